"""Autoregressive loops: chunks, passes that write keys and values; runs that skip nothing."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from toys import every_second_chunk

import diffcache

TIMES = torch.linspace(1000, 400, 10)


@pytest.mark.peer_row(22)
def test_no_reuse_before_a_chunks_first_full_step(policy, tiny_wan, loop, skips):
    """On the step axis each chunk has its own warm-up and nothing of the chunk before."""
    pipe = diffcache.wrap(tiny_wan(), policy)
    alone = loop(diffcache.wrap(tiny_wan(), policy).transformer, TIMES)
    for index in range(3):
        with diffcache.chunk(pipe, index):
            outputs = loop(pipe.transformer, TIMES)
        assert all(map(torch.equal, outputs, alone))
    rows = diffcache.report(pipe).rows
    for index in range(3):
        mine = [row for row in rows if row.chunk == index]
        assert [row.step for row in mine] == list(range(10))
        assert mine[0].decision == "compute"
        assert any(row.decision == "reuse" for row in mine) == skips(policy)


def test_a_new_chunk_begins_anew_wherever_its_times_begin(policy, tiny_wan, loop):
    """The next chunk goes on at lower times: its first call is computed all the same."""
    pipe = diffcache.wrap(tiny_wan(), policy, tail_steps=0)
    plain = tiny_wan().transformer
    with diffcache.chunk(pipe, 0):
        loop(pipe.transformer, TIMES[:6])
    for begin in (6, 7, 8, 9):
        with diffcache.chunk(pipe, begin):
            found = loop(pipe.transformer, TIMES[begin:])
        assert torch.equal(found[0], loop(plain, TIMES[begin:])[0])
        row = next(row for row in diffcache.report(pipe).rows if row.chunk == begin)
        assert row.decision == "compute" and row.step == 0


@pytest.mark.parametrize("scheduled", [True, False])
def test_chunk_axis_reuses_the_chunk_before(tiny_wan, loop, scheduled):
    """The same step of the chunk before, in chunks 1 and 3; nothing within a chunk."""
    pipe = diffcache.wrap(tiny_wan(), every_second_chunk())
    outputs = []
    for index in range(4):
        times = TIMES
        if scheduled:
            pipe.scheduler.set_timesteps(10)
            times = pipe.scheduler.timesteps
        with diffcache.chunk(pipe, index):
            outputs.append(loop(pipe.transformer, times, seed=0))
    rows = diffcache.report(pipe).rows
    expected = ["compute", "reuse", "compute", "reuse"]
    for index in range(4):
        mine = [row for row in rows if row.chunk == index]
        assert [row.decision for row in mine] == [expected[index]] * 10
    assert all(map(torch.equal, outputs[0], outputs[1]))
    assert all(map(torch.equal, outputs[2], outputs[3]))


def test_kv_write_is_computed_and_leaves_no_trace(policy, tiny_wan):
    """A clean pass between the steps: computed each time, and the steps are as without it."""
    x = torch.randn(1, 4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    text = torch.ones(1, 6, 16)

    def run(pipe, write):
        outputs = []
        for i, t in enumerate(TIMES):
            args = (x * (1 - 0.02 * i), t.expand(1), text)
            outputs.append(pipe.transformer(*args, return_dict=False)[0])
            if write:
                clean = (x * 3, torch.zeros(1), text)
                with diffcache.kv_write(pipe):
                    out = pipe.transformer(*clean, return_dict=False)[0]
                assert torch.equal(out, reference(*clean, return_dict=False)[0])
        return outputs

    reference = tiny_wan().transformer
    pipe = diffcache.wrap(tiny_wan(), policy)
    expected = run(pipe, write=False)
    before = [row.decision for row in diffcache.report(pipe).rows]
    diffcache.reset(pipe)
    assert all(map(torch.equal, run(pipe, write=True), expected))
    rows = diffcache.report(pipe).rows
    assert [row.decision for row in rows if row.reason != "kv_write"] == before
    written = [row for row in rows if row.reason == "kv_write"]
    assert len(written) == 10 and {row.decision for row in written} == {"compute"}


def test_context_managers_end_with_exceptions(policy, tiny_wan, ledgers):
    """chunk, kv_write and disabled put back what was there."""
    pipe = diffcache.wrap(tiny_wan(), policy)
    (state,) = ledgers(pipe)
    before = (state.clock.chunk, state.clock.pass_kind, state.paused)
    for manager in (
        diffcache.chunk(pipe, 3),
        diffcache.kv_write(pipe),
        diffcache.disabled(pipe),
    ):
        with pytest.raises(InterruptedError), manager:
            raise InterruptedError
    assert (state.clock.chunk, state.clock.pass_kind, state.paused) == before
    with diffcache.chunk(pipe, 1):
        with diffcache.chunk(pipe, 2):
            pass
        assert state.clock.chunk == 1


@pytest.mark.peer_row(6)
@pytest.mark.parametrize("strict", [False, True])
def test_a_run_that_skips_nothing_says_so(policy, tiny_wan, run, strict, skips):
    """A warning and a note, or an error with strict; exact settings are no failure."""
    pipe = diffcache.wrap(tiny_wan(), policy, strict=strict, min_steps=50)
    if not skips(policy):
        with warnings.catch_warnings():
            warnings.simplefilter("error", diffcache.DiffcacheWarning)
            run(pipe)
        diffcache.report(pipe)
        return
    error = pytest.raises(diffcache.DiffcacheError, match="skipped nothing")
    with error if strict else pytest.warns(diffcache.DiffcacheWarning, match="skipped nothing"):
        run(pipe)
    with error if strict else nullcontext():
        notes = diffcache.report(pipe).summary["notes"]
        assert any("nothing was skipped" in note for note in notes)


def test_strict_is_quiet_where_something_is_skipped(policy, tiny_wan, run):
    """No warning and no error in a run that did its work."""
    pipe = diffcache.wrap(tiny_wan(), policy, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", diffcache.DiffcacheWarning)
        run(pipe)
    diffcache.report(pipe)

"""What the report says of a run."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toys import COND, Bare, drive, reused, rows

import diffcache


@pytest.mark.peer_row(6)
def test_nothing_to_take_hold_of():
    """vllm-omni #4632: nothing was hooked, 0 % speed-up, and no error.

    A stack site without blocks is refused at wrap with what to do instead.
    """

    class Flat(nn.Module):
        def forward(self, x, t):
            return x * t

    with pytest.raises(ValueError, match="site='model'"):
        diffcache.wrap(Flat(), "first_block")
    with pytest.raises(ValueError, match="timestep"):
        diffcache.wrap(nn.Linear(2, 2), "hold")


@pytest.mark.peer_row(6)
@pytest.mark.peer_row(26)
def test_nothing_skipped_is_said():
    """mold PR #939: the threshold was too low, so the cache was slower than none.

    A threshold that never fires: the note names the reason, strict raises.
    """
    module = diffcache.wrap(Bare(), "first_block", threshold=1e-9, strict=True)
    drive(module, lambda step: [{"cond": COND}])
    with pytest.raises(diffcache.DiffcacheError, match="threshold"):
        diffcache.report(module)
    diffcache.wrap(module, "first_block", threshold=1e-9)
    drive(module, lambda step: [{"cond": COND}])
    assert any("threshold" in note for note in diffcache.report(module).summary["notes"])


@pytest.mark.peer_row(21)
@pytest.mark.parametrize(("warmup", "interval"), [(0, 3), (1, 2), (3, 5), (2, 4)])
def test_counters_follow_a_reference_automaton(warmup, interval):
    """ComfyUI-MagCache #17: the counter of skipped steps grew 1, 3, 7.

    Computed while warming up, then after every interval - 1 reuses; two runs.
    """
    module = diffcache.wrap(Bare(), "taylorseer", warmup_steps=warmup, interval=interval)
    expected, in_a_row = [], 0
    for step in range(12):
        compute = step < max(warmup, 1) or in_a_row == interval - 1
        in_a_row = 0 if compute else in_a_row + 1
        expected.append("compute" if compute else "reuse")
    for seed in (0, 1):
        drive(module, lambda step: [{"cond": COND}], seed=seed)
        assert [row.decision for row in rows(module)] == expected
    summary = diffcache.report(module).summary
    assert list(summary["computed"].values()) == [expected.count("compute")]
    assert list(summary["reused"].values()) == [expected.count("reuse")]


@pytest.mark.peer_row(6)
@pytest.mark.parametrize("name", diffcache.policies())
def test_default_settings_take_hold_of_something(name, tiny_wan, run_tiny):
    """Out of the box every policy hooks what it names, and skips steps of 50 or says why not."""
    pipe = diffcache.wrap(tiny_wan(), name)
    hooked = diffcache.report(pipe).summary["modules"]["transformer"]["hooked"]
    assert hooked == (3 if diffcache.get_policy(name).site.blocks else 1)
    run_tiny(pipe, steps=50, guidance=1.0)
    if name != "exact":
        notes = " ".join(diffcache.report(pipe).summary["notes"])
        assert reused(pipe) > 0 or "nothing was skipped" in notes


def test_the_error_in_the_report_is_measured(tiny_wan, run_tiny):
    """Each computed step with history says by how much a reuse would have been off."""
    pipe = diffcache.wrap(tiny_wan(), "hold")
    outputs = []
    pipe.transformer.register_forward_hook(lambda *call: outputs.append(call[-1][0].clone()))
    run_tiny(pipe, guidance=1.0)
    report = diffcache.report(pipe)
    last, measured = None, 0
    for row, out in zip(report.rows, outputs, strict=True):
        if row.decision == "reuse":
            assert row.error is None and torch.equal(out, last)
            continue
        if last is not None:
            expected = float((last - out).abs().sum() / out.abs().sum())
            assert row.error == pytest.approx(expected, rel=1e-4)
            measured += 1
        last = out
    assert measured >= 4 and report.summary["seconds"] > 0

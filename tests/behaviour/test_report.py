"""What the report says of a run."""

from __future__ import annotations

import math
import time

import pytest
import torch
from tiny_pipelines import embeddings, two_experts
from torch import nn
from toys import COND, Bare, drive, fitting, reused, rows

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
    pipe = diffcache.wrap(tiny_wan(), fitting(name))
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


@pytest.mark.peer_row(28)
def test_seconds_are_told_beside_the_counts(tiny_wan, run_tiny):
    """cache-dit #358: 23 of 50 steps were cached, and only 23 % of the time was saved.

    The report has the wall time of the loop, the denoiser's share of it, the share of each forward
    that was skipped, and what was saved by the clock: a slow scheduler is not counted as saved.
    """
    site = {"kind": "stack", "front": 1}
    pipe = diffcache.wrap(tiny_wan(), "hold", site=site)

    def slow(pipe, index, t, tensors):
        time.sleep(0.01)
        return tensors

    begun = time.perf_counter()
    run_tiny(pipe, callback_on_step_end=slow)
    wall = time.perf_counter() - begun
    summary = diffcache.report(pipe).summary
    assert summary["seconds"] + 0.11 < summary["loop_seconds"] < wall  # 11 pauses lie in between
    share = summary["seconds"] / summary["loop_seconds"]
    assert summary["denoiser_share"] == pytest.approx(share) and 0 < share < 1
    assert {row.saved for row in rows(pipe)} == {0.0, 2 / 3}  # one of three blocks always runs
    assert summary["ideal_speedup"] == pytest.approx(24 / (24 - reused(pipe) * 2 / 3))
    assert 0 <= summary["seconds_saved"] < summary["loop_seconds"]
    assert f"{share:.0%}" in str(diffcache.report(pipe))


@pytest.mark.peer_row(28)
def test_a_fast_denoiser_in_a_slow_loop_is_seen(tiny_wan, run_tiny):
    """Twice the pauses, the same calls: the share falls, the saved seconds do not grow."""
    shares = []
    for pause in (0.005, 0.05):
        pipe = diffcache.wrap(tiny_wan(), "hold")

        def slow(pipe, index, t, tensors, pause=pause):
            time.sleep(pause)
            return tensors

        run_tiny(pipe, callback_on_step_end=slow)
        shares.append(diffcache.report(pipe).summary["denoiser_share"])
    assert shares[1] < shares[0]


@pytest.mark.peer_row(26)
def test_an_expert_that_never_fires_is_named():
    """One expert's threshold is too low: the other one's reuses do not hide it."""
    policies = {
        "transformer": diffcache.get_policy("hold"),
        "transformer_2": diffcache.get_policy("first_block", threshold=1e-9),
    }
    pipe = diffcache.wrap(two_experts(), policies)
    with pytest.warns(diffcache.DiffcacheWarning, match="transformer_2"):
        pipe(
            height=64,
            width=64,
            num_frames=5,
            num_inference_steps=24,
            output_type="latent",
            generator=torch.Generator().manual_seed(0),
            **embeddings(),
        )
    (note,) = diffcache.report(pipe).summary["notes"]
    assert note.startswith("transformer_2: nothing was skipped") and "threshold" in note


@pytest.mark.peer_row(33)
def test_a_table_is_the_same_for_all_prompts_and_its_error_is_not():
    """MagCache #32: an "adaptive" curve was fixed for all prompts.

    A table is a table, and its policy says so. The errors are measured in each run, online: with
    `max_error` a prompt under which the model moves faster is computed more often.
    """
    calm, wild = torch.zeros(1, 1, 6), 3 * torch.ones(1, 1, 6)

    class Moves(Bare):
        def forward(self, x, t, cond):
            # Under the second prompt the output turns round with the time.
            return super().forward(x, t, cond) + cond * math.sin(t / 60)

    def decided(module, cond):
        drive(module, lambda step: [{"cond": cond}])
        return [row.decision for row in rows(module)], [row.error for row in rows(module)]

    static = diffcache.get_policy("taylorseer", site="model", order=0, interval=2)
    table = diffcache.wrap(Moves(), static)
    (one, small), (two, large) = decided(table, calm), decided(table, wild)
    assert one == two
    biggest = [max(error for error in errors if error is not None) for errors in (small, large)]
    assert biggest[1] > 2 * biggest[0]
    online = diffcache.wrap(Moves(), static, max_error=biggest[0])
    assert decided(online, calm)[0] == one
    assert decided(online, wild)[0].count("reuse") < one.count("reuse")
    assert "observed error" in diffcache.report(online).summary["reasons"]

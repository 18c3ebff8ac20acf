"""Ten ways in which caches of this kind are known to fail, each with what a user sees of ours."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

import diffcache

STEPS = 12


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def rows_of(target, branch):
    return [row for row in diffcache.report(target).rows if row.branch == branch]


def reused(target):
    return sum(row.decision == "reuse" for row in diffcache.report(target).rows)


def test_fact_1_switching_one_pipeline_off_leaves_all_others_alone(tiny_wan, run_tiny):
    """Two on, one off: both work, new ones are untouched, a deleted one is freed at once."""
    plain = run_tiny(tiny_wan())
    one, two = (diffcache.wrap(tiny_wan(), "hold") for _ in range(2))
    cached = run_tiny(one)
    before = str(diffcache.report(one))
    run_tiny(two)
    assert str(diffcache.report(one)) == before
    diffcache.unwrap(one)
    assert torch.equal(run_tiny(one), plain)
    assert torch.equal(run_tiny(two), cached)
    assert torch.equal(run_tiny(tiny_wan()), plain)
    reference = weakref.ref(two)
    del two
    gc.collect()
    assert reference() is None


def test_fact_2_branches_are_known_by_name_not_by_counting(tiny_wan, run_tiny):
    """Without guidance 12 steps are 12; switched off in mid-run the rest stays conditional."""
    pipe = diffcache.wrap(tiny_wan(), "hold")
    run_tiny(pipe, guidance=1.0)
    assert [row.step for row in diffcache.report(pipe).rows] == list(range(STEPS))
    assert {row.branch for row in diffcache.report(pipe).rows} == {"cond"}

    def switch_off(pipe, index, t, tensors):
        pipe._guidance_scale = 1.0 if index >= 5 else 5.0
        return tensors

    run_tiny(pipe, callback_on_step_end=switch_off)
    assert [row.step for row in rows_of(pipe, "cond")] == list(range(STEPS))
    assert [row.step for row in rows_of(pipe, "uncond")] == list(range(6))


def test_fact_2_branches_without_names_are_told_by_their_conditioning():
    """A loop that names nothing: either order of the passes, guidance off in mid-run."""
    module = diffcache.wrap(Conditioned(), "hold")
    x = torch.randn(1, 4, generator=torch.Generator().manual_seed(0))
    cond, uncond = torch.full((1, 4), 1.0), torch.full((1, 4), -1.0)
    found = {"cond": [], "uncond": []}
    for i in range(STEPS):
        passes = [("cond", cond)] if i > 7 else [("cond", cond), ("uncond", uncond)]
        for name, text in passes if i % 2 else reversed(passes):
            module(x, 1000.0 - 40 * i, text)
            found[name].append(diffcache.report(module).rows[-1])
    names = {name: {row.branch for row in rows} for name, rows in found.items()}
    assert len(names["cond"]) == len(names["uncond"]) == 1 and names["cond"] != names["uncond"]
    assert [row.step for row in found["cond"]] == list(range(STEPS))


class Conditioned(torch.nn.Module):
    """x + t + text: reused outputs of a wrong branch would be off by 2."""

    def forward(self, x, t, text):
        return x + t / 1000 + text


def test_fact_3_wrapping_again_takes_up_the_new_settings(tiny_wan, run_tiny):
    """Threshold 0, then 0.9: steps are skipped from then on."""
    pipe = diffcache.wrap(tiny_wan(), "first_block", threshold=0.0)
    run_tiny(pipe)
    assert reused(pipe) == 0
    diffcache.wrap(pipe, "first_block", threshold=0.9)
    run_tiny(pipe)
    assert reused(pipe) > 0


@pytest.mark.parametrize("name", ["hold", "first_block", "taylorseer", "balanced"])
def test_fact_4_a_denoiser_wrapped_alone_begins_anew_with_each_video(name, tiny_wan, run_tiny):
    """Only the transformer is wrapped and no step count told: each run is as in a fresh process."""
    settings = {"threshold": 0.5} if name == "first_block" else {}

    def fresh(steps, seed):
        pipe = tiny_wan()
        diffcache.wrap(pipe.transformer, name, **settings)
        return run_tiny(pipe, steps=steps, seed=seed), reused(pipe.transformer)

    pipe = tiny_wan()
    diffcache.wrap(pipe.transformer, name, **settings)
    for steps, seed in ((6, 0), (8, 1), (8, 1), (12, 2), (1, 3), (8, 2)):
        expected, count = fresh(steps, seed)
        assert torch.equal(run_tiny(pipe, steps=steps, seed=seed), expected)
        assert reused(pipe.transformer) == count
        assert diffcache.report(pipe.transformer).rows[0].decision == "compute"


@pytest.mark.parametrize("name", diffcache.policies())
def test_fact_5_default_settings_take_hold_of_something(name, tiny_wan, run_tiny):
    """Out of the box every policy hooks what it names, and skips steps of 50 or says why not."""
    pipe = diffcache.wrap(tiny_wan(), name)
    hooked = diffcache.report(pipe).summary["modules"]["transformer"]["hooked"]
    assert hooked == (3 if diffcache.get_policy(name).site.blocks else 1)
    run_tiny(pipe, steps=50, guidance=1.0)
    if name != "exact":
        notes = " ".join(diffcache.report(pipe).summary["notes"])
        assert reused(pipe) > 0 or "nothing was skipped" in notes


@pytest.mark.parametrize("site", ["model", "stack", "span", "block"])
def test_fact_6_guidance_branches_do_not_mix(site, tiny_wan, run_tiny):
    """At no site does one branch get the other one's output; the clip stays near the plain one."""
    pipe = diffcache.wrap(tiny_wan(), "hold", site=site)
    seen = {"cond": [], "uncond": []}

    def look(module, args, output):
        row = diffcache.report(pipe).rows[-1]
        seen[row.branch].append(output[0].clone())

    pipe.transformer.register_forward_hook(look)
    out, plain = run_tiny(pipe), run_tiny(tiny_wan())
    assert reused(pipe) > 0
    truth = {"cond": [], "uncond": []}
    one = tiny_wan()
    order = iter(["cond", "uncond"] * STEPS)
    one.transformer.register_forward_hook(
        lambda module, args, output: truth[next(order)].append(output[0])
    )
    run_tiny(one)
    for branch, other in (("cond", "uncond"), ("uncond", "cond")):
        for step in range(STEPS):
            near = (seen[branch][step] - truth[branch][step]).abs().mean()
            far = (seen[branch][step] - truth[other][step]).abs().mean()
            assert near < far, (branch, step)
    assert (out - plain).abs().mean() / plain.abs().mean() < 0.2


@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize("name", ["hold", "first_block", "taylorseer"])
def test_fact_7_a_cancelled_run_leaves_nothing_behind(name, size, tiny_wan, run_tiny):
    """Cancelled in a callback, then the same size or another one: as on a fresh pipeline."""

    def cancel(pipe, index, t, tensors):
        if index == 6:
            raise KeyboardInterrupt
        return tensors

    pipe = diffcache.wrap(tiny_wan(), name)
    with pytest.raises(KeyboardInterrupt):
        run_tiny(pipe, callback_on_step_end=cancel)
    expected = run_tiny(diffcache.wrap(tiny_wan(), name), size=size, seed=1)
    assert torch.equal(run_tiny(pipe, size=size, seed=1), expected)


def test_fact_8_nan_is_never_similar(tiny_wan, run_tiny):
    """From the first NaN on every step is computed, and the report says so."""

    def poison(pipe, index, t, tensors):
        if index == 4:
            tensors["latents"] = tensors["latents"] * math.nan
        return tensors

    pipe = diffcache.wrap(tiny_wan(), "first_block", threshold=1e9)
    run_tiny(pipe, callback_on_step_end=poison)
    for branch in ("cond", "uncond"):
        rows = rows_of(pipe, branch)
        assert {row.decision for row in rows[1:5]} == {"reuse"}
        assert {row.decision for row in rows[5:]} == {"compute"}
    assert any("finite" in reason for reason in diffcache.report(pipe).summary["reasons"])


@pytest.mark.parametrize(
    "site",
    [
        {"kind": "stack", "front": 2, "back": 1},
        {"kind": "stack", "front": 3},
        {"kind": "span", "start": 2, "end": 9},
        {"kind": "block", "anchor": 3},
    ],
)
def test_fact_9_more_blocks_than_there_are_is_an_error_at_wrap(site, tiny_wan, run_tiny):
    """Told at once, with the number of blocks; the pipeline stays as it was."""
    pipe = tiny_wan()
    with pytest.raises(ValueError, match="3"):
        diffcache.wrap(pipe, "hold", site=site)
    assert "forward" not in pipe.transformer.__dict__
    assert torch.equal(run_tiny(pipe), run_tiny(tiny_wan()))


def test_fact_9_every_block_runs_at_most_once(tiny_wan, run_tiny):
    """Once the structure is known, no front and back make a block run twice."""
    for front, back in ((0, 0), (1, 1), (2, 0), (0, 2)):
        site = {"kind": "stack", "front": front, "back": back}
        pipe = diffcache.wrap(tiny_wan(), "hold", site=site)
        run_tiny(pipe)
        counts = [0, 0, 0]
        for i, block in enumerate(pipe.transformer.blocks):
            block.register_forward_hook(
                lambda *_, i=i, counts=counts: counts.__setitem__(i, counts[i] + 1)
            )
        run_tiny(pipe)
        skipped = reused(pipe)
        expected = [24 - skipped if front <= i < 3 - back else 24 for i in range(3)]
        assert skipped > 0 and counts == expected


def test_fact_10_the_error_in_the_report_is_measured(tiny_wan, run_tiny):
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

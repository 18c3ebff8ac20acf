"""MagCache on Wan 2.2: each expert's curve against the published rule with its one list and split.

The published code keeps one list for both experts, and counts calls of both branches.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

import diffcache
from diffcache.features.magnitudes import MagnitudeCurve, published_curves, shifted_levels
from diffcache.features.published import published

BOUNDARY = {"t2v": 0.875, "i2v": 0.9}


def published_rule(task, ratios, split, threshold, most, retention):
    """The first branch's skips; `split` steps belong to the first expert."""
    calls, switch = 2 * len(ratios), 2 * split
    product, error, skips, decisions = 1.0, 0.0, 0, []
    for step, ratio in enumerate(ratios):
        call = 2 * step
        if task == "i2v":
            kept = call < int(switch + (calls - switch) * retention)
        else:
            low_end = (calls - switch) * retention + switch
            kept = call < int(switch * retention) or switch <= call <= low_end
        skip = False
        if not kept:
            product, skips = product * ratio, skips + 1
            error += abs(1 - product)
            skip = error < threshold and skips <= most
            if not skip:
                product, error, skips = 1.0, 0.0, 0
        decisions.append(skip)
    return decisions


def drive(gate, levels, cell, at):
    """What one expert's gate decides in its part of the run; its first step is computed."""
    decisions = []
    for step, level in enumerate(levels):
        context = at(step, len(levels), sigma=level, time=level)
        skip = step > 0 and gate.reuse(context, None, cell)
        cell.reuses_in_a_row = cell.reuses_in_a_row + 1 if skip else 0
        if not skip:
            gate.learn(context, cell)
        decisions.append(skip)
    return decisions


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_each_expert_follows_the_published_rule(task, cell_of, at):
    """At the published 40 steps and shift; image-to-video's first expert never skips."""
    names = [f"wan2.2-{task}-a14b/{name}" for name in ("transformer", "transformer_2")]
    known = published("magcache", names[1])
    levels = shifted_levels(known["steps"], known["shift"], known["top"], known["bottom"])
    split = sum(level >= BOUNDARY[task] for level in levels)
    settings = (known["threshold"], known["max_skips"], known["retention"])
    expected = published_rule(task, known["ratios"]["cond"], split, *settings)
    parts = (levels[:split], levels[split:])
    found = [
        drive(MagnitudeCurve(model=name), part, cell_of(), at)
        for name, part in zip(names, parts, strict=True)
    ]
    assert found[0] + found[1] == expected
    assert any(found[0]) == (task == "t2v") and any(found[1])


@pytest.mark.parametrize("task", ["t2v", "i2v"])
def test_no_curve_reaches_over_the_switch(task):
    """The jump between the experts (a ratio of two thirds in text-to-video) is in neither."""
    for name in ("transformer", "transformer_2"):
        for _, levels, sizes in published_curves(f"wan2.2-{task}-a14b/{name}"):
            assert all((level >= BOUNDARY[task]) == (name == "transformer") for level in levels)
            steps = [after / before for before, after in pairwise(sizes)]
            assert min(steps) > 0.75


def test_experts_of_a_pipeline_get_their_own(tiny_wan, run_tiny):
    """By name in the mapping that wrap takes; the report names both."""
    from diffusers import WanPipeline

    one, two = tiny_wan(), tiny_wan(seed=1)
    pipe = WanPipeline(
        **{**one.components, "transformer_2": two.transformer},
        boundary_ratio=0.875,
    )
    pipe.set_progress_bar_config(disable=True)
    policies = {
        name: diffcache.get_policy("magcache", model=f"wan2.2-t2v-a14b/{name}")
        for name in ("transformer", "transformer_2")
    }
    diffcache.wrap(pipe, policies)
    run_tiny(pipe, steps=40)
    notes = " ".join(diffcache.report(pipe).summary["notes"])
    for name in policies:
        assert f"curve for wan2.2-t2v-a14b/{name}" in notes
        mine = [row for row in diffcache.report(pipe).rows if row.module == name]
        assert {row.decision for row in mine} == {"compute", "reuse"}

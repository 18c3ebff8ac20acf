"""MagCache's gate against its published rule, its curves at other step counts, and bad input."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from toy_loop import ToyModel, ToyPipe, noise, sigmas, skipped

import diffcache
from diffcache.features.magnitudes import MagnitudeCurve, as_curve, shifted_levels
from diffcache.features.published import _entries

KNOWN = _entries("magcache")
SCHEDULE = ("steps", "shift", "top", "bottom")
WHOLE = [name for name in KNOWN if "levels" not in KNOWN[name]]


def magcache(ratios, threshold, most, retained):
    """MagCache as published (card 2.3): which steps are skipped, by the ratios of single steps."""
    product, error, skips, decisions = 1.0, 0.0, 0, []
    for step, ratio in enumerate(ratios):
        skip = False
        if step >= retained:
            product, skips = product * ratio, skips + 1
            error += abs(1 - product)
            skip = step > 0 and error < threshold and skips <= most
        if step >= retained and not skip:
            product, error, skips = 1.0, 0.0, 0
        decisions.append(skip)
    return decisions


def longest(decisions):
    """The longest run of skips."""
    return max((len(list(run)) for skip, run in itertools.groupby(decisions) if skip), default=0)


def drive(gate, levels, branch, cell, at):
    """What the gate decides along a run with these noise levels; the first step is computed."""
    decisions = []
    for step, level in enumerate(levels):
        fields = {"sigma": level, "time": level, "timestep": 1000 * level, "branch": branch}
        context = at(step, len(levels), **fields)
        skip = step > 0 and gate.reuse(context, None, cell)
        decisions.append(skip)
        if skip:
            cell.reuses_in_a_row += 1
        else:
            gate.learn(context, cell)
            cell.reuses_in_a_row = 0
    return decisions


def random_ratios(seed, steps):
    rng = random.Random(seed)
    return [1.0, *(rng.uniform(0.93, 1.05) for _ in range(steps - 1))]


def toy_curve(ratios):
    levels = [float(level) for level in sigmas(len(ratios))[:-1]]
    return (as_curve("cond", levels, ratios),)


@pytest.mark.parametrize("steps", [20, 50])
@pytest.mark.parametrize(("threshold", "most"), [(0.06, 3), (0.12, 4), (0.24, 6), (9.0, 2)])
@pytest.mark.parametrize("retention", [0.0, 0.2, 0.33])
def test_equals_the_published_rule(steps, threshold, most, retention):
    """In the run that the curve is of: the same steps, and latents with the residual held."""
    for seed in range(2):
        ratios = random_ratios(seed, steps)
        expected = magcache(ratios, threshold, most, int(retention * steps + 0.5))
        settings = {"threshold": threshold, "max_skips": most, "retention": retention}
        pipe = diffcache.wrap(ToyPipe(), "magcache", curves=toy_curve(ratios), **settings)
        out = pipe(steps)
        assert skipped(pipe) == expected and 0 < sum(expected) < steps
        assert torch.allclose(out, held(expected), atol=1e-5)


def held(decisions):
    """The toy's latents where the stack's residual is held at the given steps."""
    model, x, levels, rest = ToyModel(), noise(1), sigmas(len(decisions)), None
    for i, skip in enumerate(decisions):
        hidden = x
        if not skip:
            for block in model.blocks:
                hidden = block(hidden, levels[i])
            rest = hidden - x
        x = x + (levels[i + 1] - levels[i]) * model.head(x + rest)
    return x


@pytest.mark.parametrize("branch", ["cond", "uncond"])
@pytest.mark.parametrize("name", WHOLE)
def test_shipped_curves_give_the_published_decisions(name, branch, cell_of, at):
    """At the published steps, shift and settings; each branch by its own list, where it has one."""
    known = KNOWN[name]
    levels = shifted_levels(*map(known.get, SCHEDULE))
    ratios = known["ratios"].get(branch, known["ratios"]["cond"])
    retained = int(known["retention"] * len(levels) + 0.5)
    expected = magcache(ratios, known["threshold"], known["max_skips"], retained)
    assert drive(MagnitudeCurve(model=name), levels, branch, cell_of(), at) == expected
    assert 0 < sum(expected) < len(levels)
    assert longest(expected) <= known["max_skips"]


@pytest.mark.parametrize("name", WHOLE)
def test_at_half_the_steps_ratios_multiply(name, cell_of, at):
    """Every second noise level of the calibrated run: the ratio of a step is that of two."""
    known = KNOWN[name]
    levels = shifted_levels(*map(known.get, SCHEDULE))[::2]
    single = known["ratios"]["cond"]
    pairs = [1.0, *(a * b for a, b in zip(single[1::2], single[2::2], strict=False))]
    retained = int(known["retention"] * len(levels) + 0.5)
    expected = magcache(pairs, known["threshold"], known["max_skips"], retained)
    assert drive(MagnitudeCurve(model=name), levels, "cond", cell_of(), at) == expected


@pytest.mark.parametrize("steps", [10, 20, 27, 50, 100])
@pytest.mark.parametrize("shift", [3.0, 5.0, 8.0])
def test_other_step_counts_and_shifts_run(steps, shift, cell_of, at):
    """Some steps are skipped, never one of the retained, never more in a row than allowed."""
    gate, levels = MagnitudeCurve(model="wan2.1-t2v-1.3b"), shifted_levels(steps, shift, 0.999)
    decisions = drive(gate, levels, "cond", cell_of(), at)
    assert 0 < sum(decisions) < steps and longest(decisions) <= 4
    assert not any(decisions[: int(0.2 * steps + 0.5)])


def test_more_steps_skip_more(cell_of, at):
    """Steps are closer together, so more of them lie within the same change of size."""
    gate = MagnitudeCurve(model="wan2.1-t2v-1.3b", max_skips=99)
    shares = [
        sum(drive(gate, shifted_levels(steps, 5.0, 0.999), "cond", cell_of(), at)) / steps
        for steps in (10, 25, 50)
    ]
    assert shares == sorted(shares) and shares[0] < shares[-1]


@pytest.mark.parametrize("seed", range(5))
def test_skip_counter_starts_again_at_each_computed_step(seed, cell_of, at):
    """MagCache's nodes let it grow (1, 3, 7): no run of skips is longer than the first allows."""
    levels, ratios = shifted_levels(60, 3.0), random_ratios(seed, 60)
    curves = (as_curve("cond", list(levels), [1 + (r - 1) / 100 for r in ratios]),)
    for most in (1, 3, 7):
        gate = MagnitudeCurve(threshold=9.0, max_skips=most, retention=0.0, curves=curves)
        decisions = drive(gate, levels, "cond", cell_of(), at)
        assert decisions == [step % (most + 1) != 0 for step in range(60)]


def test_between_levels_the_log_of_the_size_is_interpolated(cell_of, at):
    """Size 1 at 0.8 and 0.5 at 0.4: at 0.6, half of the way, it is the root of 0.5."""
    curve = (("cond", (0.8, 0.4), (1.0, 0.5)),)
    gate = MagnitudeCurve(threshold=1 - math.sqrt(0.5) + 1e-6, retention=0.0, curves=curve)
    assert drive(gate, (0.8, 0.6), "cond", cell_of(), at) == [False, True]
    gate = MagnitudeCurve(threshold=1 - math.sqrt(0.5) - 1e-6, retention=0.0, curves=curve)
    assert drive(gate, (0.8, 0.6), "cond", cell_of(), at) == [False, False]


def test_decisions_ignore_the_content():
    """Other noise, same steps: the curve alone decides."""
    pipe = diffcache.wrap(ToyPipe(), "magcache", curves=toy_curve(random_ratios(0, 30)))
    decisions = []
    for seed in (1, 2):
        pipe(30, seed=seed)
        decisions.append(skipped(pipe))
    assert decisions[0] == decisions[1] and any(decisions[0])


def test_a_model_without_a_curve_is_refused_at_wrap():
    """The message says how to measure one, and nothing is left on the model."""
    pipe = ToyPipe()
    before = set(pipe.transformer.__dict__)
    with pytest.raises(ValueError, match="no magnitude curve") as caught:
        diffcache.wrap(pipe, "magcache")
    message = str(caught.value)
    assert (
        "wrap(pipe, measure(pipe, run)) with diffcache.magnitudes.measure" in message
        and "\n" not in message
    )
    assert set(pipe.transformer.__dict__) == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": -0.1}, "threshold must be at least 0, got -0.1"),
        ({"max_skips": 1.5}, "max_skips must be a whole number, got 1.5"),
        ({"retention": 1.2}, "retention must be in [0, 1], got 1.2"),
        ({"model": "wan2.1-t2v-1.4b"}, "did you mean 'wan2.1-t2v-14b' or 'wan2.1-t2v-1.3b'"),
        ({"curves": (("cond", (0.5, 0.8), (1.0, 1.0)),)}, "must have falling noise levels"),
        ({"curves": (("cond", (0.8, 0.5), (1.0,)),)}, "must have falling noise levels"),
        ({"curves": (("cond", (0.8, 0.5), (1.0, 0.0)),)}, "must have sizes above 0"),
        ({"curves": (("cond", (0.8, 0.5), (1.0, float("nan"))),)}, "must have sizes above 0"),
    ],
)
def test_settings_are_checked(settings, message):
    """What was expected stands in the message."""
    with pytest.raises(ValueError) as caught:
        MagnitudeCurve(**settings)
    assert message in str(caught.value)


def test_curves_survive_a_file(tmp_path):
    """A measured policy is saved and loaded as an equal one."""
    policy = diffcache.get_policy("magcache", curves=toy_curve(random_ratios(0, 12)))
    for name in ("p.json", "p.yaml"):
        policy.save(tmp_path / name)
        assert diffcache.load(tmp_path / name) == policy

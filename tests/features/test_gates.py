"""Gates against hand-written automata, and where a table puts its steps."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from diffcache.features.base import build
from diffcache.features.gates import Accumulate, Interval, Table, Threshold


def drive(gate, values, cell, at):
    """Feeds a gate one value after another and counts as a denoiser would."""
    decisions = []
    for step, value in enumerate(values):
        context = at(step)
        reuse = step > 0 and gate.reuse(context, value, cell)
        decisions.append(reuse)
        if reuse:
            cell.reused, cell.reuses_in_a_row = cell.reused + 1, cell.reuses_in_a_row + 1
        else:
            gate.learn(context, cell)
            cell.computed, cell.reuses_in_a_row = cell.computed + 1, 0
    return decisions


@pytest.mark.parametrize("seed", range(20))
def test_threshold_equals_automaton(seed, cell_of, at):
    """Threshold looks at the present value alone."""
    rng = random.Random(seed)
    values = [rng.choice([None, rng.uniform(0, 0.1), 0.05]) for _ in range(40)]
    expected = [i > 0 and v is not None and v < 0.05 for i, v in enumerate(values)]
    assert drive(Threshold(threshold=0.05), values, cell_of(), at) == expected


@pytest.mark.parametrize("seed", range(20))
def test_accumulate_equals_automaton(seed, cell_of, at):
    """Accumulate adds up since the last computed step and starts again there."""
    rng = random.Random(seed)
    values = [rng.choice([None, 0.0, rng.uniform(0, 0.05)]) for _ in range(40)]
    expected, total = [False], 0.0
    for value in values[1:]:
        total = total + value if value is not None else 0.0
        expected.append(value is not None and total < 0.08)
        total = total if expected[-1] else 0.0
    assert drive(Accumulate(threshold=0.08), values, cell_of(), at) == expected


@pytest.mark.parametrize("gate", [Threshold(threshold=0.0), Accumulate(threshold=0.0)])
def test_threshold_zero_never_reuses(gate, cell_of, at):
    """The comparison is strict: not even an unchanged input is reused."""
    assert not any(drive(gate, [0.0] * 12, cell_of(), at))


@pytest.mark.parametrize("interval", [1, 2, 3, 5])
def test_interval_computes_every_nth(interval, cell_of, at):
    """Steps 0, n, 2n, ... are computed."""
    decisions = drive(Interval(interval=interval), [None] * 16, cell_of(), at)
    assert decisions == [step % interval != 0 for step in range(16)]


def test_interval_starts_again_after_a_forced_step(cell_of, at):
    """The distance counts from the last computed step, whoever asked for it."""
    gate, cell = Interval(interval=3), cell_of()
    cell.reuses_in_a_row = 0  # a guard has just computed step 4
    assert gate.reuse(at(5), None, cell)
    cell.reuses_in_a_row = 2
    assert not gate.reuse(at(7), None, cell)


def table(gate, num_steps, cell_of, at, warmup=0, tail=0):
    """The steps that a table computes under guards that force nothing by themselves."""
    guards = {"kind": "guards", "warmup_steps": warmup, "tail_steps": tail, "min_steps": 0}
    cell = cell_of(gate=gate, guards=guards)
    contexts = [at(step, num_steps) for step in range(num_steps)]
    return {context.step for context in contexts if not gate.reuse(context, None, cell)}


@pytest.mark.parametrize("num_steps", [8, 12, 25, 50])
@pytest.mark.parametrize("fraction", [0.2, 0.4, 0.5, 0.75, 1.0])
@pytest.mark.parametrize("growth", [1.0, 1.5, 4.0])
def test_table_computes_the_asked_share(num_steps, fraction, growth, cell_of, at):
    """round(fraction * steps), but never fewer than warm-up and tail."""
    gate = Table(fraction=fraction, growth=growth)
    steps = table(gate, num_steps, cell_of, at, 3, 1)
    assert len(steps) == max(4, round(fraction * num_steps))
    assert {0, 1, 2, num_steps - 1} <= steps <= set(range(num_steps))


def test_table_by_hand(cell_of, at):
    """12 steps, half of them: 3 first, the last, and 2 spread over the 8 between."""
    steps = table(Table(fraction=0.5), 12, cell_of, at, 3, 1)
    assert steps >= {0, 1, 2, 11} and len(steps) == 6
    first, second = sorted(steps - {0, 1, 2, 11})
    assert 2 <= first - 2 <= 4 and 2 <= second - first <= 4 and 2 <= 11 - second <= 4


@pytest.mark.parametrize(("num_steps", "fraction"), [(50, 0.4), (30, 0.3), (40, 0.5), (100, 0.2)])
def test_table_gaps_are_even(num_steps, fraction, cell_of, at):
    """With growth 1 no gap is more than one step longer than another."""
    steps = table(Table(fraction=fraction), num_steps, cell_of, at, 3, 1)
    gaps = [b - a for a, b in pairwise(sorted(steps)[2:])]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize("fraction", [0.1, 0.2, 0.3])
def test_table_growth_is_closer_early(fraction, cell_of, at):
    """With growth 2 gaps grow along the run, by hand at one place: (i / (n + 1)) ** 2."""
    steps = sorted(table(Table(fraction=fraction, growth=2.0), 100, cell_of, at))
    gaps = [b - a for a, b in pairwise(steps)]
    assert gaps[-1] > 1.5 * gaps[0] and sorted(gaps[::3]) == gaps[::3]
    middle = len(steps) // 2
    assert abs(steps[middle] - 100 * ((middle + 1) / (len(steps) + 1)) ** 2) <= 2


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4])
def test_table_on_runs_shorter_than_its_ends(num_steps, cell_of, at):
    """Warm-up and tail cover everything: nothing breaks, all is computed."""
    steps = table(Table(fraction=0.1), num_steps, cell_of, at, 3, 1)
    assert steps == set(range(num_steps))


def test_table_with_named_steps(cell_of, at):
    """`steps` outranks `fraction` and needs no run length."""
    gate = Table(fraction=1.0, steps=(0, 3, 4))
    computed = [step for step in range(6) if not gate.reuse(at(step), None, cell_of())]
    assert computed == [0, 3, 4]


@pytest.mark.parametrize(("fraction", "expected"), [(0.5, 20), (0.25, 10), (1.0, 40)])
def test_table_without_run_length(fraction, expected, cell_of, at):
    """The share holds when nobody says how long the run is."""
    decisions = drive(Table(fraction=fraction), [None] * 40, cell_of(), at)
    assert abs(decisions.count(False) - expected) <= 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Interval(interval=0), "interval must be at least 1, got 0"),
        (lambda: Threshold(threshold=-0.1), "threshold must be at least 0, got -0.1"),
        (lambda: Threshold(threshold=float("nan")), "threshold must be at least 0, got nan"),
        (lambda: Accumulate(threshold=-1), "threshold must be at least 0, got -1"),
        (lambda: Accumulate(threshold=float("nan")), "threshold must be at least 0, got nan"),
        (lambda: Table(fraction=1.4), "fraction must be in [0.01, 1], got 1.4"),
        (lambda: Table(fraction=0.0), "fraction must be in [0.01, 1], got 0.0"),
        (lambda: Table(fraction=float("nan")), "fraction must be in [0.01, 1], got nan"),
        (lambda: Table(growth=0.5), "growth must be in [1, 4], got 0.5"),
        (lambda: Table(growth=float("nan")), "growth must be in [1, 4], got nan"),
    ],
)
def test_settings_are_checked(make, message):
    """The message names the setting, the bounds and what was given."""
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == message


def test_table_steps_survive_json():
    """A list of steps, as a file gives it, becomes the same part as a tuple."""
    assert build("gate", {"kind": "table", "steps": [0, 3]}) == Table(steps=(0, 3))


@pytest.mark.parametrize("interval", [2.5, True])
def test_an_interval_is_a_whole_number(interval):
    """A part of a step cannot be skipped."""
    with pytest.raises(ValueError, match=f"interval must be a whole number, got {interval}"):
        Interval(interval=interval)

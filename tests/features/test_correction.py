"""Correction: what predictions got wrong is paid back at the next computed step."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from diffcache.features.predictors import Polynomial


def drive(cell, at, truth, times, computed):
    """Plays a run; returns the sum of width times output, as handed out and as it should be."""
    handed = wanted = 0.0
    for step, (time, after) in enumerate(pairwise(times)):
        context = at(step, time=time, width=after - time)
        value = torch.tensor([truth(time), 2 * truth(time)])
        if step in computed:
            corrected = cell.correct(context, (value,))
            cell.push(context, None, (value,), value)
            out = value if corrected is None else corrected[0]
        else:
            (out,) = cell.predict(context, (value,))
        handed, wanted = handed + (after - time) * out, wanted + (after - time) * value
    return handed, wanted


def uneven(steps, seed):
    rng = random.Random(seed)
    return sorted((rng.uniform(0, 1) for _ in range(steps + 1)), reverse=True)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("order", [0, 1])
def test_a_straight_line_is_paid_back_exactly(order, seed, cell_of, at):
    """Held or extrapolated, the sum over a run that ends computed equals the full run's."""
    cell = cell_of(predictor=Polynomial(order=order, correct=True))
    times = uneven(12, seed)
    handed, wanted = drive(cell, at, lambda t: 3 - 2 * t, times, {0, 3, 5, 8, 9, 11})
    assert torch.allclose(handed, wanted, atol=1e-4)


def test_without_correction_a_held_line_drifts(cell_of, at):
    """The test above can fail: without paying back the sum is off."""
    cell = cell_of(predictor=Polynomial(order=0, correct=False))
    handed, wanted = drive(cell, at, lambda t: 3 - 2 * t, uneven(12, 0), {0, 3, 5, 8, 9, 11})
    assert (handed - wanted).abs().max() > 1e-2


def test_by_hand(cell_of, at):
    """Times 1, .8, .6, .4; computed 10 and 16; the held 10 should have been 13: .2 * 3 / .2 = 3."""
    cell = cell_of(predictor=Polynomial(order=0, correct=True))
    first, last = torch.tensor([10.0]), torch.tensor([16.0])
    start = at(0, time=1.0, width=-0.2)
    assert cell.correct(start, (first,)) is None
    cell.push(start, None, (first,), first)
    cell.predict(at(1, time=0.8, width=-0.2), (first,))
    (corrected,) = cell.correct(at(2, time=0.6, width=-0.2), (last,))
    assert corrected.item() == pytest.approx(19.0, abs=1e-4)


def test_debts_are_paid_once(cell_of, at):
    """The next computed step in a row owes nothing; nor does a cleared cell."""
    cell = cell_of(predictor=Polynomial(order=0, correct=True))
    value = torch.ones(2)
    cell.push(at(0, width=-1.0), None, (value,), value)
    cell.predict(at(1, width=-1.0), (value,))
    assert cell.correct(at(2, width=-1.0), (value,)) is not None
    assert cell.correct(at(3, width=-1.0), (value,)) is None
    cell.predict(at(4, width=-1.0), (value,))
    cell.clear()
    assert cell.correct(at(5, width=-1.0), (value,)) is None


@pytest.mark.parametrize("width", [None, 0.0])
def test_unknown_or_empty_width_pays_nothing(width, cell_of, at):
    """Where no step width is known nothing can be weighed."""
    cell = cell_of(predictor=Polynomial(order=0, correct=True))
    value = torch.ones(2)
    cell.push(at(0, width=width), None, (value,), value)
    cell.predict(at(1, width=width), (value,))
    assert cell.correct(at(2, width=width), (2 * value,)) is None


def test_history_keeps_the_truth(cell_of, at):
    """What is handed out is corrected, what is remembered is not."""
    cell = cell_of(predictor=Polynomial(order=0, correct=True))
    drive(cell, at, lambda t: 3 - 2 * t, [1.0, 0.7, 0.5, 0.4], {0, 2})
    assert cell.history[-1].tensors[0].tolist() == pytest.approx([2.0, 4.0])

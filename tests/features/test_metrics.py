"""Metrics of the feature pipeline, against hand-calculated values."""

from __future__ import annotations

import math

import pytest
import torch

PARTS = {"probe": "site_input", "gate": {"kind": "accumulate", "threshold": 1e9}}


def push(cell, context, fingerprint, truth):
    cell.push(context, fingerprint, (truth,), truth)


def test_relative_l1_by_hand(cell_of, at):
    """|[2, 4] - [1, 3]| over |[1, 3]|: 2 / 4."""
    cell = cell_of(metric="relative_l1", **PARTS)
    push(cell, at(0), torch.tensor([1.0, -3.0]), torch.ones(2))
    assert cell.decide(at(1), torch.tensor([2.0, -4.0])).metric == pytest.approx(0.5)


def test_relative_l1_compares_with_the_last_computed_step(cell_of, at):
    """Reused steps in between do not move the reference."""
    cell = cell_of(metric="relative_l1", **PARTS)
    push(cell, at(0), torch.tensor([1.0, 1.0]), torch.ones(2))
    values = [cell.decide(at(i), torch.full((2,), 1.0 + 0.1 * i)).metric for i in (1, 2, 3)]
    assert values == pytest.approx([0.1, 0.2, 0.3])
    push(cell, at(4), torch.tensor([2.0, 2.0]), torch.ones(2))
    assert cell.decide(at(5), torch.full((2,), 3.0)).metric == pytest.approx(0.5)


def test_relative_l1_of_nothing_is_not_a_number(cell_of, at):
    """A zero reference gives infinity or NaN, both of which compute."""
    cell = cell_of(metric="relative_l1", **PARTS)
    push(cell, at(0), torch.zeros(2), torch.ones(2))
    for now in (torch.zeros(2), torch.ones(2)):
        decision = cell.decide(at(1), now)
        assert not math.isfinite(decision.metric) and not decision.reuse


def test_rate_scaled_by_hand(cell_of, at):
    """k = |d out| / |d in| = 6 / 2; then k |x - x_prev| / |out| = 3 * 0.5 / 10."""
    cell = cell_of(metric="rate_scaled", **PARTS)
    push(cell, at(0), torch.tensor([1.0, 1.0]), torch.tensor([4.0, 4.0]))
    assert cell.decide(at(1), torch.tensor([3.0, 3.0])).metric is None  # no rate known yet
    push(cell, at(1), torch.tensor([3.0, 3.0]), torch.tensor([10.0, -2.0]))
    value = cell.decide(at(2), torch.tensor([3.5, 3.5])).metric
    assert value == pytest.approx((6 / 2) * 0.5 / 6)


def test_rate_scaled_measures_from_call_to_call(cell_of, at):
    """The input is compared with the call before, computed or not; the rate stays."""
    cell = cell_of(metric="rate_scaled", **PARTS)
    push(cell, at(0), torch.full((2,), 1.0), torch.full((2,), 1.0))
    push(cell, at(1), torch.full((2,), 2.0), torch.full((2,), 2.0))
    inputs = [2.2, 2.3, 2.7]
    values = [cell.decide(at(i), torch.full((2,), x)).metric for i, x in enumerate(inputs, 2)]
    assert values == pytest.approx([0.1, 0.05, 0.2], rel=1e-5)


def test_rate_scaled_with_unlike_sizes(cell_of, at):
    """Means, not sums: input and output may differ in their channels."""
    cell = cell_of(metric="rate_scaled", **PARTS)
    push(cell, at(0), torch.full((6,), 1.0), torch.full((2,), 1.0))
    push(cell, at(1), torch.full((6,), 2.0), torch.full((2,), 5.0))
    assert cell.decide(at(2), torch.full((6,), 2.5)).metric == pytest.approx(4 * 0.5 / 5)


def test_rate_scaled_with_a_still_input_computes(cell_of, at):
    """Two equal inputs give no rate: division by zero must not reuse."""
    cell = cell_of(metric="rate_scaled", **PARTS)
    push(cell, at(0), torch.ones(2), torch.full((2,), 1.0))
    push(cell, at(1), torch.ones(2), torch.full((2,), 2.0))
    assert not cell.decide(at(2), torch.full((2,), 1.5)).reuse
    assert not cell.decide(at(3), torch.full((2,), 1.5)).reuse


@pytest.mark.parametrize("metric", ["relative_l1", "rate_scaled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sums_do_not_saturate(metric, dtype, cell_of, at):
    """Sums over 200 000 half-precision elements are made in fp32."""
    cell = cell_of(metric=metric, **PARTS)
    ones = torch.ones(200_000, dtype=dtype)
    push(cell, at(0), ones, ones)
    push(cell, at(1), 2 * ones, 2 * ones)
    expected = {"relative_l1": 0.5, "rate_scaled": 1 / 2}[metric]
    assert cell.decide(at(2), 3 * ones).metric == pytest.approx(expected, rel=1e-2)

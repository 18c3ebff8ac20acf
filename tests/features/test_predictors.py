"""Predictors: exact on polynomials of their order, by hand at order 1, and the order chosen."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from diffcache.features.predictors import BestOrder, Hold, Polynomial, lagrange_weights


def combine(weights, values):
    return sum(w * v for w, v in zip(weights, values, strict=True))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_polynomial_is_exact_on_its_order(order, seed, cell_of):
    """With uneven and falling times, a polynomial of degree `order` is continued exactly."""
    rng = random.Random(seed)
    times = sorted((rng.uniform(0.2, 1.0) for _ in range(order + 1)), reverse=True)
    time = times[-1] - rng.uniform(0.01, 0.1)
    factors = [rng.uniform(-2, 2) for _ in range(order + 1)]

    def truth(t):
        return sum(c * t**i for i, c in enumerate(factors))

    weights = Polynomial(order=order).weights(times, time, cell_of())
    gap = min((a - b for a, b in itertools.pairwise(times)), default=1.0)
    assert combine(weights, map(truth, times)) == pytest.approx(truth(time), abs=1e-9 / gap**order)


def test_polynomial_is_not_exact_above_its_order(cell_of):
    """Order 1 misses a parabola: the test above can fail."""
    times = [1.0, 0.8]
    weights = Polynomial(order=1).weights(times, 0.5, cell_of())
    assert abs(combine(weights, [t * t for t in times]) - 0.25) > 0.01


@pytest.mark.parametrize(("gap", "ahead"), [(1, 1), (5, 1), (5, 4), (2, 3)])
def test_order_one_is_taylor(gap, ahead, cell_of):
    """TaylorSeer by hand: F(t + k) = F + k (F - F_prev) / gap."""
    before, now = 3.0, 3.7
    weights = Polynomial(order=1).weights([0.0, float(gap)], float(gap + ahead), cell_of())
    assert combine(weights, [before, now]) == pytest.approx(now + ahead * (now - before) / gap)


def test_order_two_is_newton(cell_of):
    """Divided differences by hand: times 0, 1, 3 and values 1, 2, 10, read at 4: D1 4, D2 1."""
    weights = Polynomial(order=2).weights([0.0, 1.0, 3.0], 4.0, cell_of())
    assert combine(weights, [1.0, 2.0, 10.0]) == pytest.approx(10 + 4 * 1 + 1 * 1 * 3)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_degree_falls_with_short_history(order, cell_of):
    """One computed step can only be held."""
    assert Polynomial(order=order).weights([0.5], 0.4, cell_of()) == [1.0]


def test_older_steps_get_no_weight(cell_of):
    """What the order does not need has weight 0, and there is a weight for each step."""
    weights = Polynomial(order=1).weights([1.0, 0.9, 0.7, 0.6], 0.5, cell_of())
    assert weights[:2] == [0.0, 0.0] and len(weights) == 4
    assert Hold().weights([1.0, 0.9, 0.7], 0.5, cell_of()) == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_weights_reproduce_known_points_and_sum_to_one(order):
    """At a remembered time the value itself comes out; constants are kept."""
    times = [0.9, 0.75, 0.5, 0.45][: order + 1]
    for i, time in enumerate(times):
        expected = [float(i == j) for j in range(order + 1)]
        if order:
            assert lagrange_weights(times, time, order) == pytest.approx(expected)
    assert sum(lagrange_weights(times, 0.1, order)) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "predictor", [Hold(), Polynomial(order=2), BestOrder(max_gain=1000, max_order=2)]
)
def test_depth_is_what_the_weights_use(predictor, cell_of):
    """No step within `depth` is kept in vain: each can get a weight, none beyond it does."""
    times = [1.0 - 0.1 * i - 0.01 * i * i for i in range(predictor.depth + 2)]
    cell = cell_of(predictor=predictor)
    if isinstance(predictor, BestOrder):
        errors = {3: [3.0, 2.0, 1.0], 2: [3.0, 2.0], 1: [3.0]}
        predictor.learn(times, 0.3, lambda rows: errors[len(rows)], cell)
    weights = predictor.weights(times, 0.3, cell)
    assert all(weight == 0 for weight in weights[: -predictor.depth])
    assert weights[-predictor.depth] != 0


def learn_curve(predictor, curve, cell, at, steps=8):
    """Pushes computed steps of a curve; the outputs are single numbers."""
    for step in range(steps):
        value = torch.tensor([curve(float(-step)), 1.0])
        cell.push(at(step), None, (value,), value)


@pytest.mark.parametrize(
    "curve", [lambda t: 2.0 - 0.5 * t, lambda t: 0.3 * t * t - t, lambda t: 4.0]
)
def test_best_order_continues_the_curve(curve, cell_of, at):
    """Constants, straight lines and parabolas are continued exactly."""
    predictor = BestOrder(max_gain=1000, max_order=2, memory=0.5)
    cell = cell_of(predictor=predictor)
    learn_curve(predictor, curve, cell, at)
    weights = predictor.weights([entry.time for entry in cell.history], -8.0, cell)
    values = [curve(entry.time) for entry in cell.history]
    assert combine(weights, values) == pytest.approx(curve(-8.0))


def test_best_order_holds_what_jumps(cell_of, at):
    """Extrapolating a curve that jumps up and down makes it worse."""
    predictor = BestOrder(max_gain=1000, max_order=2, memory=0.5)
    cell = cell_of(predictor=predictor)
    learn_curve(predictor, lambda t: 5.0 + (1.0 if round(t) % 2 else -1.0), cell, at)
    times = [entry.time for entry in cell.history]
    assert predictor.weights(times, -8.0, cell) == lagrange_weights(times, -8.0, 0)


def test_best_order_trusts_what_was_not_compared(cell_of):
    """The highest order that the steps allow until something was compared."""
    predictor, cell = BestOrder(max_gain=1000, max_order=2), cell_of()
    assert predictor.weights([1.0], 0.5, cell) == [1.0]
    times = [1.0, 0.9, 0.7]
    assert predictor.weights(times, 0.5, cell) == lagrange_weights(times, 0.5, 2)


def test_best_order_memory_by_hand(cell_of):
    """Errors of orders 0 and 1: (1, 3) then (4, 1); memory decides which experience counts."""
    times = [1.0, 0.9]
    for memory, order in [(0.0, 1), (0.9, 0)]:
        predictor, cell = BestOrder(max_order=1, memory=memory, margin=1.0), cell_of()
        rows = iter([[1.0, 3.0], [4.0, 1.0]])
        for _ in range(2):
            predictor.learn(times, 0.8, lambda weights, rows=rows: next(rows), cell)
        assert predictor.weights(times, 0.8, cell) == lagrange_weights(times, 0.8, order)


def test_best_order_margin(cell_of):
    """At margin 2 a lower order must be more than twice as good as the one above."""
    times = [1.0, 0.9]
    for error, order in [(0.6, 1), (0.4, 0)]:
        predictor, cell = BestOrder(max_order=1, margin=2.0), cell_of()
        predictor.learn(times, 0.8, lambda rows, error=error: [error, 1.0], cell)
        assert predictor.weights(times, 0.8, cell) == lagrange_weights(times, 0.8, order)


def test_best_order_outlives_an_undefined_error(cell_of, at):
    """A step of zeros has no relative error; afterwards a straight line is found all the same."""
    predictor = BestOrder(max_order=1, memory=0.5)
    cell = cell_of(predictor=predictor)
    zero = torch.zeros(2)
    cell.push(at(0), None, (zero,), zero)
    cell.push(at(1), None, (zero,), zero)
    for step in range(2, 12):
        value = torch.tensor([float(step), 2.0 * step])
        cell.push(at(step), None, (value,), value)
    times = [entry.time for entry in cell.history]
    assert predictor.weights(times, -12.0, cell) == lagrange_weights(times, -12.0, 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Polynomial(order=4), "order must be in [0, 3], got 4"),
        (lambda: Polynomial(order=-1), "order must be in [0, 3], got -1"),
        (lambda: BestOrder(max_order=5), "max_order must be in [0, 3], got 5"),
        (lambda: BestOrder(memory=1.0), "memory must be in [0, 0.99], got 1.0"),
        (lambda: BestOrder(memory=float("nan")), "memory must be in [0, 0.99], got nan"),
        (lambda: BestOrder(margin=0.5), "margin must be at least 1, got 0.5"),
    ],
)
def test_settings_are_checked(make, message):
    """The message names the setting, the bounds and what was given."""
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == message


def test_best_order_falls_where_errors_would_be_amplified(cell_of):
    """Two spacings ahead order 2 has weights 3, -8, 6 (17 in all), so it gives way to order 1."""
    times = [0.0, 1.0, 2.0]
    assert lagrange_weights(times, 4.0, 2) == pytest.approx([3.0, -8.0, 6.0])
    for max_gain, order in [(17.5, 2), (16.5, 1), (4.5, 0)]:
        weights = BestOrder(max_gain=max_gain).weights(times, 4.0, cell_of())
        assert weights == lagrange_weights(times, 4.0, order)

"""Predictors: weights over the computed steps that rebuild the output at another time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .base import Errors, Predictor, check_range, part
from .cell import Cell


@part("predictor")
@dataclass(frozen=True, kw_only=True)
class Hold(Predictor):
    """The last computed output."""

    @property
    def depth(self) -> int:
        return 1

    def weights(self, times: list[float], time: float, cell: Cell) -> list[float]:
        return [0.0] * (len(times) - 1) + [1.0]


@part("predictor")
@dataclass(frozen=True, kw_only=True)
class Polynomial(Predictor):
    """The polynomial of degree `order` through the last order + 1 computed outputs."""

    order: int = 1

    def __post_init__(self) -> None:
        check_range("order", self.order, 0, 3)

    @property
    def depth(self) -> int:
        return self.order + 1

    def weights(self, times: list[float], time: float, cell: Cell) -> list[float]:
        return lagrange_weights(times, time, self.order)


@part("predictor")
@dataclass(frozen=True, kw_only=True)
class BestOrder(Predictor):
    """The polynomial order that has been right: the errors of all orders are compared at computed
    steps.

    `memory` is the weight of older errors; 0 trusts the last comparison alone. `bias` is how many
    times smaller a higher order's error must be before it is preferred to the lower one.
    """

    adaptive: ClassVar[bool] = True
    max_order: int = 2
    memory: float = 0.5
    bias: float = 1.0

    def __post_init__(self) -> None:
        check_range("max_order", self.max_order, 0, 3)
        check_range("memory", self.memory, 0, 0.99)
        check_range("bias", self.bias, 1)

    @property
    def depth(self) -> int:
        return self.max_order + 1

    def weights(self, times: list[float], time: float, cell: Cell) -> list[float]:
        return lagrange_weights(times, time, self._order(len(times) - 1, cell))

    def learn(self, times: list[float], time: float, errors: Errors, cell: Cell) -> float:
        used = self._order(len(times) - 1, cell)
        orders = range(min(self.max_order, len(times) - 1) + 1)
        found = errors([lagrange_weights(times, time, order) for order in orders])
        for order, value in enumerate(found):
            if math.isfinite(value):  # a truth of zeros, or a NaN, says nothing about orders
                before = cell.numbers.get(f"error_{order}", value)
                cell.numbers[f"error_{order}"] = self.memory * before + (1 - self.memory) * value
        return found[used]

    def _order(self, available: int, cell: Cell) -> int:
        """The order with the smallest remembered error; 1 until something was compared."""
        known = [
            cell.numbers.get(f"error_{order}")
            for order in range(min(self.max_order, available) + 1)
        ]
        best = min(1, len(known) - 1)
        if known[0] is None:
            return best
        best = 0
        for order, value in enumerate(known):
            smallest = known[best]
            if value is not None and smallest is not None and value * self.bias < smallest:
                best = order
        return best


def lagrange_weights(times: Sequence[float], time: float, order: int) -> list[float]:
    """Weights of the polynomial of degree `order` through the newest order + 1 of `times`, read at
    `time`.

    With fewer times the degree falls; older entries get weight 0. `times` are distinct.
    """
    used = list(times[-(order + 1) :])
    weights = []
    for i, here in enumerate(used):
        weight = 1.0
        for j, other in enumerate(used):
            if j != i:
                weight *= (time - other) / (here - other)
        weights.append(weight)
    return [0.0] * (len(times) - len(used)) + weights

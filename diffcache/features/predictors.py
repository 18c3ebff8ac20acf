"""Predictors: weights over the computed steps that rebuild the output at another time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..parts import check_count, check_range
from .base import Errors, Predictor, part
from .cell import Cell
from .polynomial import lagrange_weights


@part("predictor")
@dataclass(frozen=True, kw_only=True)
class Hold(Predictor):
    """The last computed output."""

    @property
    def depth(self) -> int:
        return 1

    def weights(self, times: list[float], time: float, cell: Cell) -> list[float]:
        return [0.0] * (len(times) - 1) + [1.0]


@dataclass(frozen=True, kw_only=True)
class Extrapolation(Predictor):
    """Base of the polynomial predictors; with `correct` predictions are paid back later."""

    correct: bool = False

    @property
    def corrects(self) -> bool:
        return self.correct


@part("predictor")
@dataclass(frozen=True, kw_only=True)
class Polynomial(Extrapolation):
    """The polynomial of degree `order` through the last order + 1 computed outputs."""

    order: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("order", self.order, 0, 3)

    @property
    def depth(self) -> int:
        return self.order + 1

    def weights(self, times: list[float], time: float, cell: Cell) -> list[float]:
        return lagrange_weights(times, time, self.order)


@part("predictor")
@dataclass(frozen=True, kw_only=True)
class BestOrder(Extrapolation):
    """The polynomial order that has been right: all orders are compared at computed steps.

    A higher order is preferred until a lower one's error is `margin` times smaller: the error of a
    low order is a drift that adds up from step to step, that of a high one mostly noise that does
    not. An order whose weights would amplify an error more than `max_gain` times is not used.
    `memory` is the weight of older errors; 0 trusts the last comparison alone.
    """

    adaptive: ClassVar[bool] = True
    max_order: int = 2
    memory: float = 0.5
    margin: float = 2.5
    max_gain: float = 6.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("max_order", self.max_order, 0, 3)
        check_range("memory", self.memory, 0, 0.99)
        check_range("margin", self.margin, 1)
        check_range("max_gain", self.max_gain, 1)

    @property
    def depth(self) -> int:
        return self.max_order + 1

    def weights(self, times: list[float], time: float, cell: Cell) -> list[float]:
        order = self._order(len(times) - 1, cell)
        weights = lagrange_weights(times, time, order)
        while order > 0 and sum(map(abs, weights)) > self.max_gain:
            order -= 1
            weights = lagrange_weights(times, time, order)
        return weights

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
        """The order to use with `available` + 1 steps; one not compared yet is trusted."""
        best = min(self.max_order, available)
        for order in reversed(range(best)):
            error, chosen = (cell.numbers.get(f"error_{i}", math.inf) for i in (order, best))
            if chosen < math.inf and error * self.margin < chosen:
                best = order
        return best

"""Gates: compute or reuse, once no guard objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..context import CallContext
from .base import Gate, check_range, part
from .cell import Cell


@part("gate")
@dataclass(frozen=True, kw_only=True)
class Interval(Gate):
    """Computes every `interval`-th step."""

    interval: int = 5

    def __post_init__(self) -> None:
        check_range("interval", self.interval, 1)

    def reuse(self, context: CallContext, value: float | None, cell: Cell) -> bool:
        return cell.reuses_in_a_row < self.interval - 1


@part("gate")
@dataclass(frozen=True, kw_only=True)
class Threshold(Gate):
    """Reuses while the metric is below `threshold`; at 0 nothing is ever reused."""

    threshold: float = 0.05

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, 0)

    def reuse(self, context: CallContext, value: float | None, cell: Cell) -> bool:
        return value is not None and value < self.threshold


@part("gate")
@dataclass(frozen=True, kw_only=True)
class Accumulate(Gate):
    """Reuses while the metric, summed since the last computed step, stays below `threshold`."""

    threshold: float = 0.05

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, 0)

    def reuse(self, context: CallContext, value: float | None, cell: Cell) -> bool:
        if value is None:
            return False
        total = cell.numbers.get("accumulated", 0.0) + value
        cell.numbers["accumulated"] = total
        return total < self.threshold

    def learn(self, context: CallContext, cell: Cell) -> None:
        cell.numbers["accumulated"] = 0.0


@part("gate")
@dataclass(frozen=True, kw_only=True)
class Table(Gate):
    """Computes a fixed share of the steps: warm-up, tail, and the rest spread over what lies
    between.

    `steps` names the computed steps outright. Else the share `fraction` is spread so that the
    gaps, which are 1 at fraction 1, are `growth` times as long in the middle of the run as at its
    ends. Where the length of the run is unknown, gaps are even.
    """

    fraction: float = 0.5
    growth: float = 1.0
    steps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_range("fraction", self.fraction, 0.01, 1)
        check_range("growth", self.growth, 1, 10)

    def reuse(self, context: CallContext, value: float | None, cell: Cell) -> bool:
        if self.steps is not None:
            return context.step not in self.steps
        if context.num_steps is None:
            return cell.computed >= self.fraction * (cell.computed + cell.reused + 1)
        guards = cell.policy.guards
        table = computed_steps(
            context.num_steps, self.fraction, self.growth, guards.warmup_steps, guards.tail_steps
        )
        return context.step not in table


@lru_cache(maxsize=256)
def computed_steps(
    num_steps: int, fraction: float, growth: float = 1.0, warmup: int = 0, tail: int = 0
) -> frozenset[int]:
    """The steps to compute: `fraction` of `num_steps` in all, warm-up and tail among them."""
    ends = {*range(min(warmup, num_steps)), *range(max(0, num_steps - tail), num_steps)}
    inner = [step for step in range(num_steps) if step not in ends]
    wanted = max(0, round(fraction * num_steps) - len(ends))
    if wanted >= len(inner):
        return frozenset(range(num_steps))
    return frozenset(ends | {inner[i] for i in _spread(len(inner), wanted, growth)})


def _spread(length: int, count: int, growth: float) -> Sequence[int]:
    """`count` of `length` positions, the gaps in the middle `growth` times those at the ends."""
    density = [
        1 / (1 + (growth - 1) * 4 * u * (1 - u))
        for u in ((i + 0.5) / length for i in range(length))
    ]
    total, passed = sum(density), 0.0
    chosen: list[int] = []
    for position, amount in enumerate(density):
        passed += amount
        if passed >= total * (len(chosen) + 1) / (count + 1) and len(chosen) < count:
            chosen.append(position)
    return chosen

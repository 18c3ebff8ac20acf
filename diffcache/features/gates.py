"""Gates: compute or reuse, once no guard objects."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..context import CallContext
from ..parts import check_count, check_range
from .base import Gate, part
from .cell import Cell


@part("gate")
@dataclass(frozen=True, kw_only=True)
class Interval(Gate):
    """Computes every `interval`-th step."""

    interval: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("interval", self.interval, 1)

    def reuse(self, context: CallContext, value: float | None, cell: Cell) -> bool:
        return cell.reuses_in_a_row < self.interval - 1


@part("gate")
@dataclass(frozen=True, kw_only=True)
class Threshold(Gate):
    """Reuses while the metric is below `threshold`; at 0 nothing is ever reused."""

    threshold: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("threshold", self.threshold, 0)

    def reuse(self, context: CallContext, value: float | None, cell: Cell) -> bool:
        return value is not None and value < self.threshold


@part("gate")
@dataclass(frozen=True, kw_only=True)
class Accumulate(Gate):
    """Reuses while the metric, summed since the last computed step, stays below `threshold`."""

    threshold: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
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
    """Computes a fixed share of the steps: warm-up, tail, and the rest spread in between.

    Of n steps in between the i-th lies at (i / (n + 1)) ** growth of the way: 1 spaces them evenly,
    more puts them closer early on, where errors decide what the video becomes. Without a schedule
    in sight the gaps are even. `steps` names the computed steps outright.
    """

    fraction: float = 0.5
    growth: float = 1.0
    steps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("fraction", self.fraction, 0.01, 1)
        check_range("growth", self.growth, 1, 4)

    def reuse(self, context: CallContext, value: float | None, cell: Cell) -> bool:
        if self.steps is not None:
            return context.step not in self.steps
        num_steps, guards = context.num_steps, cell.policy.guards
        if num_steps is None:
            after = max(0, cell.computed - guards.warmup_steps)
            return after >= self.fraction * (after + cell.reused + 1)
        table = computed_steps(
            num_steps, self.fraction, self.growth, guards.warmup_steps, guards.tail_steps
        )
        return context.step not in table


@lru_cache(maxsize=256)
def computed_steps(
    num_steps: int, fraction: float, growth: float = 1.0, warmup: int = 0, tail: int = 0
) -> frozenset[int]:
    """The steps to compute: `fraction` of all in all, warm-up and tail among them."""
    ends = {*range(min(warmup, num_steps)), *range(max(0, num_steps - tail), num_steps)}
    inner = [step for step in range(num_steps) if step not in ends]
    wanted = min(len(inner), max(0, round(fraction * num_steps) - len(ends)))
    return frozenset(ends | {inner[i] for i in _spread(len(inner), wanted, growth)})


def _spread(length: int, count: int, growth: float) -> list[int]:
    """`count` distinct positions below `length`, closer together at the start if growth > 1."""
    chosen: list[int] = []
    for i in range(1, count + 1):
        wanted = round((length + 1) * (i / (count + 1)) ** growth) - 1
        earliest = chosen[-1] + 1 if chosen else 0
        chosen.append(min(max(wanted, earliest), length - 1 - count + i))
    return chosen

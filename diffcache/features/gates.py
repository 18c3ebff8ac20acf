"""Gates: compute or reuse, once no guard objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

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
    """Computes a fixed share of the steps: warm-up, tail, and the rest spread in between.

    The share `fraction` is spread so that the gap at a step is inversely proportional to how far
    time moves there, to the `power`: 0 spaces computed steps evenly by index, 1 evenly in sigma.
    Without a schedule in sight the gaps are even. `steps` names the computed steps outright.
    """

    fraction: float = 0.5
    power: float = 0.0
    steps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_range("fraction", self.fraction, 0.01, 1)
        check_range("power", self.power, 0, 4)

    def reuse(self, context: CallContext, value: float | None, cell: Cell) -> bool:
        if self.steps is not None:
            return context.step not in self.steps
        num_steps, guards = context.num_steps, cell.policy.guards
        if num_steps is None:
            return cell.computed >= self.fraction * (cell.computed + cell.reused + 1)
        times = (
            context.times if self.power and context.times else tuple(map(float, range(num_steps)))
        )
        table = computed_steps(
            times, self.fraction, self.power, guards.warmup_steps, guards.tail_steps
        )
        return context.step not in table


@lru_cache(maxsize=256)
def computed_steps(
    times: tuple[float, ...], fraction: float, power: float = 0.0, warmup: int = 0, tail: int = 0
) -> frozenset[int]:
    """The steps to compute: `fraction` of all in all, warm-up and tail among them."""
    length = len(times)
    ends = {*range(min(warmup, length)), *range(max(0, length - tail), length)}
    inner = [step for step in range(length) if step not in ends]
    wanted = max(0, round(fraction * length) - len(ends))
    if wanted >= len(inner):
        return frozenset(range(length))
    steps = [abs(b - a) for a, b in pairwise((*(times[1:2] or times), *times))]
    return frozenset(ends | {inner[i] for i in _spread([steps[i] ** power for i in inner], wanted)})


def _spread(density: Sequence[float], count: int) -> Sequence[int]:
    """`count` positions of a list, as dense as told, with equal amounts between neighbours."""
    total, passed = sum(density), 0.0
    chosen: list[int] = []
    for position, amount in enumerate(density):
        passed += amount
        due = total * (len(chosen) + 1) / (count + 1)
        left = len(density) - position
        if len(chosen) < count and (passed >= due - 1e-9 * total or left <= count - len(chosen)):
            chosen.append(position)
    return chosen

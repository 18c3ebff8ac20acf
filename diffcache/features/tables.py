"""Computed-step tables over sigma: the shipped ones, and how one is laid on another schedule.

A table lists the noise levels of the steps to compute, found by `schedule.fit` on one schedule. On
another schedule (more steps, fewer, another shift) the positions are interpolated between the
nearest tables and each is put on the nearest step still free.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..context import CallContext
from ..parts import check_count, check_range
from .base import part
from .cell import Cell
from .gates import Table, computed_steps
from .guards import Guards

if TYPE_CHECKING:
    from ..policy import Policy

Levels = tuple[float, ...]
MOST = 0.8  # of a short run, so that there is something to gain
FILE = Path(__file__).with_name("tables.json")


@part("gate")
@dataclass(frozen=True, kw_only=True)
class SigmaTable(Table):
    """Computed steps from a table over sigma where there is one, else as `Table` spaces them.

    `fraction` is the share of the scheduler's steps; of an expert or an img2img run, which serves
    some of the levels, those that fall there are computed. `reference_steps` is the length of run
    that `fraction` is meant for: shorter runs compute more of their steps and longer ones fewer, by
    the square root (four fifths at most), since what must be known does not grow with the steps;
    None: the same share everywhere. `sigmas` is a table of one's own, noise levels in any order,
    and overrules `fraction`; `shipped` False leaves the shipped tables aside. While the last
    checked prediction was off by more than `halve_above` (relative L1 error), a table's gaps are
    halved: a step right after a computed one would make the next slope from two outputs between
    which the latents were put right, which is worse than none.
    """

    reference_steps: int | None = None
    sigmas: Levels | None = None
    shipped: bool = True
    halve_above: float | None = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference_steps is not None:
            check_count("reference_steps", self.reference_steps, 1)
        if self.halve_above is not None:
            check_range("halve_above", self.halve_above, 0)
        if self.sigmas is not None and not (
            self.sigmas and all(0 <= sigma <= 1 for sigma in self.sigmas)
        ):
            raise ValueError(f"sigmas must be noise levels in [0, 1], got {self.sigmas!r}")

    def reuse(self, context: CallContext, value: float | None, cell: Cell) -> bool:
        if self.steps is not None or context.num_steps is None:
            return super().reuse(context, value, cell)
        if context.levels is not None:
            table = self._table(context.levels, context.solver or "", cell.policy.guards)
            if table is not None:
                return context.place not in table and not self._halved(context.place, table, cell)
        guards, share = cell.policy.guards, self.share(context.num_steps)
        table = computed_steps(
            context.num_steps, share, self.growth, guards.warmup_steps, guards.tail_steps
        )
        return context.step not in table and not self._halved(context.step, table, cell)

    def remark(self, policy: Policy, context: CallContext) -> str | None:
        if self.steps is not None or self.sigmas is not None or self.fraction == 1:
            return None
        if context.levels is None or context.solver is None:
            return "no flow-matching scheduler tells the noise levels: gaps between steps are even"
        if self._table(context.levels, context.solver, policy.guards) is None:
            return f"no table of computed steps for {context.solver}: an analytic one is used"
        return (
            f"computed steps by the table for {context.solver} that was measured on diffcache's "
            "demo model; diffcache.calibrate.calibrate finds one for this model"
        )

    def _halved(self, place: int, table: frozenset[int], cell: Cell) -> bool:
        """Whether `place` is the middle of a gap that is not trusted as a whole."""
        if self.halve_above is None or cell.numbers.get("error", 0.0) <= self.halve_above:
            return False
        before = max((step for step in table if step < place), default=-1)
        after = min((step for step in table if step > place), default=place)
        alone = cell.reuses_in_a_row == place - before - 1
        return alone and 2 * (place - before) >= after - before

    def share(self, num_steps: int) -> float:
        """The part of `num_steps` steps that is computed."""
        if self.reference_steps is None or self.fraction == 1:
            return self.fraction
        scaled = self.fraction * math.sqrt(self.reference_steps / num_steps)
        return min(scaled, max(self.fraction, MOST))

    def _table(self, levels: Levels, solver: str, guards: Guards) -> frozenset[int] | None:
        if self.sigmas is not None:
            return placed(self.sigmas, levels)
        if not self.shipped:
            return None
        share = self.share(len(levels))
        return shipped_steps(levels, solver, share, guards.warmup_steps, guards.tail_steps)


@lru_cache(maxsize=256)
def shipped_steps(
    levels: Levels, solver: str, share: float, warmup: int = 3, tail: int = 1
) -> frozenset[int] | None:
    """The steps to compute of a schedule with these noise levels; None: no table for this solver.

    Args:
        levels: noise level of each step, falling from near 1 (flow matching).
        solver: class name of the scheduler.
        share: the part of the steps to compute, in (0, 1].
        warmup, tail: steps at both ends that are computed in any case, and counted.
    """
    tables, steps = shipped_tables().get(solver), len(levels)
    if tables is None or steps < 2 or levels[0] <= levels[-1]:
        return None
    count = max(round(share * steps), warmup + tail)
    if count >= steps:
        return frozenset(range(steps))
    at = [math.log(shift_of(levels)), math.log(steps), share]
    wanted = _blend(tables, at, count, levels)
    inner = placed(tuple(wanted[warmup : count - tail]), levels[warmup : steps - tail])
    ends = {*range(warmup), *range(steps - tail, steps)}
    return frozenset(ends | {warmup + step for step in inner})


@lru_cache(maxsize=256)
def placed(wanted: Levels, levels: Levels) -> frozenset[int]:
    """The steps of a schedule nearest to the `wanted` noise levels, each step taken once."""
    rising = [-level for level in levels]  # noise levels fall
    chosen: list[int] = []
    for i, target in enumerate(sorted(-sigma for sigma in wanted)[: len(levels)]):
        right = bisect_left(rising, target)
        near = min(
            (k for k in (right - 1, right) if 0 <= k < len(rising)),
            key=lambda k: abs(rising[k] - target),
        )
        earliest = chosen[-1] + 1 if chosen else 0
        latest = len(levels) - min(len(wanted), len(levels)) + i
        chosen.append(min(max(near, earliest), latest))
    return frozenset(chosen)


@lru_cache(maxsize=1)
def shipped_tables() -> Mapping[str, Any]:
    """Solver -> log shift -> log steps -> share -> noise levels of the computed steps."""
    described = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        solver: {
            math.log(float(shift)): {
                math.log(int(steps)): {float(share): levels for share, levels in shares.items()}
                for steps, shares in lengths.items()
            }
            for shift, lengths in shifts.items()
        }
        for solver, shifts in described["tables"].items()
    }


def shift_of(levels: Sequence[float]) -> float:
    """The flow shift of a schedule, read off its middle: the odds of sigma over those unshifted."""
    middle = len(levels) // 2
    sigma, even = levels[middle], 1 - middle / len(levels)
    return max(sigma, 1e-6) * (1 - even) / (even * max(1 - sigma, 1e-6))


def _blend(node: Any, at: Sequence[float], count: int, levels: Levels) -> list[float]:
    """`count` noise levels, interpolated between the nearest tables in each coordinate of `at`."""
    if not at:
        return _resampled(node, count)
    known = {**node, 1.0: levels} if len(at) == 1 else node  # at share 1 all are computed
    keys = sorted(known)
    right = min(max(bisect_left(keys, at[0]), 1), len(keys) - 1)
    low, high = (keys[right - 1], keys[right]) if len(keys) > 1 else (keys[0], keys[0])
    weight = min(max((at[0] - low) / (high - low), 0.0), 1.0) if high > low else 0.0
    first = _blend(known[low], at[1:], count, levels)
    second = _blend(known[high], at[1:], count, levels) if weight else first
    return [a + weight * (b - a) for a, b in zip(first, second, strict=True)]


def _resampled(values: Sequence[float], count: int) -> list[float]:
    """`count` values read off the line through `values`, ends included."""
    if count == 1:
        return [values[0]]
    found = []
    for i in range(count):
        position = i * (len(values) - 1) / (count - 1)
        left = min(int(position), len(values) - 2)
        found.append(values[left] + (position - left) * (values[left + 1] - values[left]))
    return found

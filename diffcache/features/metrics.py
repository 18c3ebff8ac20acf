"""Metrics: how far a fingerprint lies from an earlier one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import Metric, part
from .cell import Cell, quotient, sum_abs


@part("metric")
@dataclass(frozen=True, kw_only=True)
class RelativeL1(Metric):
    """mean |now - reference| / mean |reference|, the reference being the last computed step's."""

    def measure(self, now: Tensor, reference: Tensor, cell: Cell) -> float:
        return quotient(sum_abs(now - reference), cell.reference_sum(reference))


@part("metric")
@dataclass(frozen=True, kw_only=True)
class PreviousL1(RelativeL1):
    """The same, the reference being the call before, computed or not."""

    reference: ClassVar[str] = "previous"


@part("metric")
@dataclass(frozen=True, kw_only=True)
class RateScaled(Metric):
    """k * mean |now - previous| / mean |last output|, with k = mean |d out| / mean |d in|.

    The rate k is taken between the last two computed steps. Source: EasyCache, arXiv 2507.02860.
    """

    reference: ClassVar[str] = "previous"

    def measure(self, now: Tensor, reference: Tensor, cell: Cell) -> float | None:
        rate = cell.numbers.get("rate")
        if rate is None:
            return None
        return rate * sum_abs(now - reference)

    def learn(self, now: Tensor, truth: Tensor, cell: Cell) -> None:
        last_in, last_out = cell.kept("last_in", now), cell.kept("last_out", truth)
        if last_in is not None and last_out is not None:
            moved = sum_abs(now - last_in)
            rate = quotient(sum_abs(truth - last_out), moved * sum_abs(truth))
            cell.numbers["rate"] = rate
        cell.keep("last_in", now)
        cell.keep("last_out", truth)

"""DBCache's gate: a threshold, and a mask of steps that are computed whatever it says."""

from __future__ import annotations

from dataclasses import dataclass

from ..context import CallContext
from ..parts import check_count, check_range
from .base import Gate, part
from .cell import Cell


@part("gate")
@dataclass(frozen=True, kw_only=True)
class MaskedThreshold(Gate):
    """Reuses while the metric is below `threshold`, where the mask allows it.

    Attributes:
        threshold: at 0 nothing is ever reused, whatever the mask says.
        mask: for each step 1 (compute) or 0 (may be reused); laid over runs of another length by
            position.
        static: a 0 in the mask reuses without asking the threshold.
        max_reused: most reuses in a run, per branch.
    """

    threshold: float = 0.08
    mask: tuple[int, ...] | None = None
    static: bool = False
    max_reused: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("threshold", self.threshold, 0)
        if self.mask is not None:
            object.__setattr__(self, "mask", tuple(self.mask))
            if not self.mask or any(bit not in (0, 1) for bit in self.mask):
                raise ValueError(
                    "mask must be 1 (compute) or 0 (may be reused) for each step, "
                    f"got {self.mask!r}"
                )
        if self.static and self.mask is None:
            raise ValueError("static needs a mask: give mask=(1, 1, 0, ...)")
        if self.max_reused is not None:
            check_count("max_reused", self.max_reused, 0)

    def reuse(self, context: CallContext, value: float | None, cell: Cell) -> bool:
        if self.mask is not None and must_compute(self.mask, context.step, context.num_steps):
            return False
        if self.max_reused is not None and cell.reused >= self.max_reused:
            return False
        if self.static and self.threshold > 0:
            return True
        return value is not None and value < self.threshold


def must_compute(mask: tuple[int, ...], step: int, num_steps: int | None) -> bool:
    """Whether a mask, laid over a run of `num_steps` where that is known, wants a step computed."""
    place = step if num_steps is None else step * len(mask) // num_steps
    return place < len(mask) and mask[place] == 1

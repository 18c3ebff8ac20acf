"""TeaCache's gate: how far the output moves, by a polynomial fitted to one model, summed up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from ..context import CallContext
from ..parts import check_count, check_range
from .base import Gate, part
from .cell import Cell
from .published import check_model, published

if TYPE_CHECKING:
    from ..policy import Policy

# Where no threshold is published: on the summed relative change of the signal itself.
PLAIN_THRESHOLD = 0.07


@part("gate")
@dataclass(frozen=True, kw_only=True)
class FittedAccumulate(Gate):
    """Reuses while polynomial(metric), summed since the last computed step, is below `threshold`.

    A polynomial fits the steps it was fitted on: in a run of another length the metric of one step
    is brought to that spacing and its image back again, so a longer run does not leave the fitted
    range. A negative value, which no distance is, counts as 0.

    Attributes:
        threshold: None takes the model's published one.
        coefficients: highest power first; None takes the model's published ones for the probe's
            signal, and the metric as it is where there are none.
        fitted_steps: steps of the runs that `coefficients` were fitted on; None: taken as they are.
        model: whose published numbers to take; None is found out by wrap, "" is none.
    """

    threshold: float | None = None
    coefficients: tuple[float, ...] | None = None
    fitted_steps: int | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            check_range("threshold", self.threshold, 0)
        if self.coefficients is not None and not (
            self.coefficients and all(map(isfinite, self.coefficients))
        ):
            raise ValueError(
                f"coefficients must be one finite number or more, got {self.coefficients!r}"
            )
        if self.fitted_steps is not None:
            check_count("fitted_steps", self.fitted_steps, 1)
        check_model("teacache", self.model)

    def reuse(self, context: CallContext, value: float | None, cell: Cell) -> bool:
        if value is None:
            return False
        known = self._known(cell.policy)
        steps = len(context.levels) if context.levels else context.num_steps
        total = cell.numbers.get("accumulated", 0.0) + self._change(value, steps, known)
        cell.numbers["accumulated"] = total
        return total < self._limit(known)

    def learn(self, context: CallContext, cell: Cell) -> None:
        cell.numbers["accumulated"] = 0.0

    def remark(self, policy: Policy, context: CallContext) -> str | None:
        if self.coefficients is not None:
            return None
        known = self._known(policy)
        if known is None:
            return (
                "TeaCache's polynomial is published neither for this model nor this signal: the "
                f"signal's own change is summed (threshold {self._limit(None):g}); give "
                "coefficients=, or model= if it is another name of a known one"
            )
        return f"TeaCache's polynomial for {self.model} (threshold {self._limit(known):g})"

    def _known(self, policy: Policy) -> Mapping[str, Any] | None:
        """What is published for this model and the probe's signal: coefficients, threshold."""
        entry = published("teacache", self.model)
        if entry is None:
            return None
        signal = getattr(policy.probe, "signal", None) or next(iter(entry["signals"]))
        found = entry["signals"].get(signal)
        return None if found is None else {**found, "steps": entry["steps"]}

    def _limit(self, known: Mapping[str, Any] | None) -> float:
        if self.threshold is not None:
            return self.threshold
        return PLAIN_THRESHOLD if known is None else float(known["threshold"])

    def _change(self, value: float, steps: int | None, known: Mapping[str, Any] | None) -> float:
        coefficients, fitted = self.coefficients, self.fitted_steps
        if coefficients is None:
            if known is None:
                return value
            coefficients, fitted = known["coefficients"], fitted or known["steps"]
        spacing = steps / fitted if steps and fitted else 1.0
        total = 0.0
        for coefficient in coefficients:
            total = total * value * spacing + coefficient
        return max(0.0, total / spacing)

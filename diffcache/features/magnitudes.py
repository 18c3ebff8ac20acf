"""MagCache's gate: the size of the residual over the noise level, known before the run."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import mul
from typing import TYPE_CHECKING, Any

from ..context import CallContext
from ..parts import check_count, check_range
from .base import Gate, part
from .cell import Cell
from .published import check_model, published

if TYPE_CHECKING:
    from ..policy import Policy

# Branch -> (noise levels, falling; size of the residual at each, in units of the first).
Curve = tuple[str, tuple[float, ...], tuple[float, ...]]
DEFAULTS = {"threshold": 0.06, "max_skips": 3, "retention": 0.2}
# Steps kept where the length of the run is not known: 0.2 of the usual 25 to 28.
UNKNOWN_LENGTH = 5
NO_CURVE = (
    "magcache has no magnitude curve for {}: wrap(pipe, measure(pipe, run)) with "
    "diffcache.magnitudes.measure makes one, model= names a known one"
)


@part("gate")
@dataclass(frozen=True, kw_only=True)
class MagnitudeCurve(Gate):
    """Reuses while the residual's size, by a curve measured before, has hardly changed.

    A residual held from noise level a stands for one whose size is ratio = size(now) / size(a)
    times as large; |1 - ratio| is summed over the reused steps. At the steps of the run in which
    the curve was measured, the ratio is the product of that run's step ratios, so decisions are
    the published ones; in between the log of the size is interpolated over the noise level, so the
    ratio over a gap is that over the calibrated steps passed.

    Attributes:
        threshold, max_skips, retention: most summed error, most reuses in a row, share of the
            steps computed at the start; None takes what is published with the curve, or diffusers'
            defaults (0.06, 3, 0.2).
        curves: a curve of one's own for each branch; see `diffcache.magnitudes`. A branch without
            one is judged by the worst of the others.
        model: whose published curve to take; None is found out by wrap.

    Raises:
        ValueError: settings out of range, a model without a curve.
    """

    threshold: float | None = None
    max_skips: int | None = None
    retention: float | None = None
    curves: tuple[Curve, ...] | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            check_range("threshold", self.threshold, 0)
        if self.max_skips is not None:
            check_count("max_skips", self.max_skips, 0)
        if self.retention is not None:
            check_range("retention", self.retention, 0, 1)
        if self.curves is not None:
            object.__setattr__(self, "curves", tuple(_checked(*curve) for curve in self.curves))
        check_model("magcache", self.model)
        if self.model is not None and self._curves() is None:
            raise ValueError(NO_CURVE.format(self.model or "this model"))

    def reuse(self, context: CallContext, value: float | None, cell: Cell) -> bool:
        if context.step < self._retained(context):
            return False
        error = cell.numbers.get("skip_error", 0.0) + self._off(context, cell)
        cell.numbers["skip_error"] = error
        within = cell.reuses_in_a_row < self._setting("max_skips")
        return within and error < self._setting("threshold")

    def learn(self, context: CallContext, cell: Cell) -> None:
        cell.numbers["skip_error"] = 0.0
        cell.numbers["computed_at"] = self._level(context)

    def describe(self) -> str:
        values = {**asdict(self), "curves": self.curves and f"{len(self.curves)} measured"}
        return f"{self.kind}({', '.join(f'{name}={value}' for name, value in values.items())})"

    def remark(self, policy: Policy, context: CallContext) -> str | None:
        if self.curves is not None:
            return None
        used = ", ".join(f"{name} {self._setting(name):g}" for name in DEFAULTS)
        return f"MagCache's curve for {self.model} ({used})"

    def _off(self, context: CallContext, cell: Cell) -> float:
        """|1 - size now / size of the last computed residual|."""
        curves = self._curves()
        if curves is None:
            raise ValueError(NO_CURVE.format(self.model or "this model"))
        before, now = cell.numbers["computed_at"], self._level(context)
        own = [curve for curve in curves if curve[0] == context.branch]
        return max(abs(1 - _at(curve, now) / _at(curve, before)) for curve in own or curves)

    def _retained(self, context: CallContext) -> int:
        if context.num_steps is None:
            return UNKNOWN_LENGTH
        return int(self._setting("retention") * context.num_steps + 0.5)

    def _level(self, context: CallContext) -> float:
        """The noise level; of models of flow matching the timestep tells it too."""
        if context.sigma is not None and 0 <= context.sigma <= 1:
            return context.sigma
        known = published("magcache", self.model)
        return context.timestep / (known["timestep_scale"] if known else 1000)

    def _setting(self, name: str) -> float:
        own: float | None = getattr(self, name)
        if own is not None:
            return own
        known = published("magcache", self.model) if self.curves is None else None
        value: float = DEFAULTS[name] if known is None else known[name]
        return value

    def _curves(self) -> tuple[Curve, ...] | None:
        return published_curves(self.model) if self.curves is None else self.curves


@lru_cache(maxsize=64)
def published_curves(model: str | None) -> tuple[Curve, ...] | None:
    """The curves of a model over sigma, from the step ratios and the schedule they came from."""
    known = published("magcache", model)
    if known is None:
        return None
    schedule = (known[name] for name in ("steps", "shift", "top", "bottom"))
    levels = shifted_levels(*schedule)
    low, high = known.get("levels", (0.0, 1.0))
    curves = []
    for branch, ratios in known["ratios"].items():
        sizes = accumulate(ratios, mul)
        kept = [pair for pair in zip(levels, sizes, strict=True) if low <= pair[0] <= high]
        curves.append(_checked(branch, *zip(*kept, strict=True)))
    return tuple(curves)


def shifted_levels(
    steps: int, shift: float, top: float = 1.0, bottom: float = 0.0
) -> tuple[float, ...]:
    """Noise levels of `steps` even steps from `top` to before `bottom`, moved by a flow shift."""
    even = [top + (bottom - top) * step / steps for step in range(steps)]
    return tuple(shift * level / (1 + (shift - 1) * level) for level in even)


def as_curve(branch: str, levels: list[float], ratios: list[float]) -> Curve:
    """A curve from the ratio of each step's residual to that of the step before (the first is 1).

    Raises:
        ValueError: levels that do not fall, ratios that are not above 0.
    """
    return _checked(branch, tuple(levels), tuple(accumulate(ratios, mul)))


def _checked(branch: str, levels: Any, sizes: Any) -> Curve:
    levels, sizes = tuple(levels), tuple(sizes)
    falling = all(a > b for a, b in pairwise(levels))
    if not levels or len(levels) != len(sizes) or not falling:
        raise ValueError(f"the curve of {branch!r} must have falling noise levels, a size for each")
    if not all(size > 0 and math.isfinite(size) for size in sizes):
        raise ValueError(f"the curve of {branch!r} must have sizes above 0")
    return branch, levels, sizes


def _at(curve: Curve, level: float) -> float:
    """The size at a noise level: its log linear in between, constant beyond the ends."""
    _, levels, sizes = curve
    right = bisect_left(levels, -level, key=lambda x: -x)
    if right == 0 or right == len(levels):
        return sizes[min(right, len(levels) - 1)]
    left = right - 1
    share = (levels[left] - level) / (levels[left] - levels[right])
    return sizes[left] * (sizes[right] / sizes[left]) ** share if share else sizes[left]

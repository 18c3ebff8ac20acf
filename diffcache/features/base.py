"""The parts of a feature policy: site, probe, metric, gate, predictor, guards, store.

A part is a frozen dataclass: its fields are its settings, nothing else lives on it. What a part
remembers between calls lies in the `Cell` it is handed, so one part may serve many pipelines at
once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from .. import parts
from ..parts import PartT, SlotPart
from .kinds import check_kinds

if TYPE_CHECKING:
    from ..context import CallContext
    from ..policy import Policy
    from .cell import Cell

SLOTS = ("site", "probe", "metric", "gate", "predictor", "guards", "store")
Errors = Callable[[list[list[float]]], list[float]]
PARTS: parts.Registry = {slot: {} for slot in SLOTS}


@dataclass(frozen=True, kw_only=True)
class Part(SlotPart):
    """Base of every part of a feature policy."""

    def __post_init__(self) -> None:
        check_kinds(self)

    def fitted(self, policy: Policy, model: str) -> Part:
        """This part for the model that is to be wrapped; "" is none that anything is known of."""
        if getattr(self, "model", model) is None:
            return replace(self, model=model)  # type: ignore[call-arg]
        return self

    def remark(self, policy: Policy, context: CallContext) -> str | None:
        """What the report of a run that begins here should say of this part, if anything."""
        return None


def part(slot: str) -> Callable[[type[PartT]], type[PartT]]:
    """Registers a part under its class name in snake_case."""
    return parts.registered(PARTS, slot)


def build(slot: str, description: Any) -> Any:
    """A part from itself, its kind or what `to_dict` wrote; see `diffcache.parts.build`."""
    return parts.build(PARTS, slot, description)


@dataclass(frozen=True, kw_only=True)
class Probe(Part):
    """Something cheap that says how far the input moved."""

    blocks: ClassVar[bool] = False  # needs the blocks of a stack site

    def fingerprint(self, entry: Tensor, here: Tensor) -> Tensor:
        """What is compared between calls.

        Args:
            entry: what went into the first block, or into the model (no blocks), any shape.
            here: what goes into the cached site; `entry` itself at the model site.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Metric(Part):
    """The distance between a fingerprint and an earlier one."""

    reference: ClassVar[str] = "last_computed"  # or "previous": the call before, computed or not

    def measure(self, now: Tensor, reference: Tensor, cell: Cell) -> float | None:
        """None: not enough is known yet to measure."""
        raise NotImplementedError

    def learn(self, now: Tensor, truth: Tensor, cell: Cell) -> None:
        """Called after a computed step with the fingerprint and the site's true output."""


@dataclass(frozen=True, kw_only=True)
class Gate(Part):
    """Compute or reuse, once no guard objects."""

    def reuse(self, context: CallContext, value: float | None, cell: Cell) -> bool:
        """Whether to reuse; `value` is the metric, None without one."""
        raise NotImplementedError

    def learn(self, context: CallContext, cell: Cell) -> None:
        """Called after a computed step."""


@dataclass(frozen=True, kw_only=True)
class Predictor(Part):
    """Rebuilds what was not computed from what was, at the right time."""

    adaptive: ClassVar[bool] = (
        False  # changes with what it sees, so batch items influence each other
    )

    @property
    def corrects(self) -> bool:
        """Whether computed outputs pay back what predictions got wrong (features/correction.py)."""
        return False

    @property
    def depth(self) -> int:
        """How many computed steps it wants to see."""
        raise NotImplementedError

    def weights(self, times: list[float], time: float, cell: Cell) -> list[float]:
        """One weight for each of the remembered steps (oldest first) for the output at `time`."""
        raise NotImplementedError

    def learn(self, times: list[float], time: float, errors: Errors, cell: Cell) -> float:
        """Called before a computed step enters the history, to compare prediction and truth.

        Args:
            errors: relative L1 errors of the predictions made with given rows of weights.

        Returns:
            The error of the prediction that would have been used.
        """
        return errors([self.weights(times, time, cell)])[0]

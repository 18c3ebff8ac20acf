"""The parts of a feature policy: site, probe, metric, gate, predictor, guards, store.

A part is a frozen dataclass: its fields are its settings, nothing else lives on it. What a part
remembers between calls lies in the `Cell` it is handed, so one part may serve many pipelines at
once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor

from .kinds import check_kinds

if TYPE_CHECKING:
    from ..context import CallContext
    from ..policy import Policy
    from .cell import Cell

SLOTS = ("site", "probe", "metric", "gate", "predictor", "guards", "store")
Errors = Callable[[list[list[float]]], list[float]]
PARTS: dict[str, dict[str, type[Part]]] = {slot: {} for slot in SLOTS}


@dataclass(frozen=True, kw_only=True)
class Part:
    """Base of every part; `slot` says where in a policy it goes, `kind` is its name in a file."""

    slot: ClassVar[str] = ""
    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_kinds(self)

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **asdict(self)}

    def describe(self) -> str:
        """The kind and its settings on one line: "threshold(0.05)"."""
        values = ", ".join(f"{name}={value}" for name, value in asdict(self).items())
        return f"{self.kind}({values})" if values else self.kind

    def fitted(self, policy: Policy, model: str) -> Part:
        """This part for the model that is to be wrapped; "" is none that anything is known of."""
        if getattr(self, "model", model) is None:
            return replace(self, model=model)  # type: ignore[call-arg]
        return self

    def remark(self, policy: Policy, context: CallContext) -> str | None:
        """What the report of a run that begins here should say of this part, if anything."""
        return None


PartT = TypeVar("PartT", bound=Part)


def part(slot: str) -> Callable[[type[PartT]], type[PartT]]:
    """Registers a part under its class name in snake_case."""

    def register(cls: type[PartT]) -> type[PartT]:
        cls.slot = slot
        cls.kind = re.sub(r"(?<=[a-z])(?=[A-Z0-9])", "_", cls.__name__).lower()
        PARTS[slot][cls.kind] = cls
        return cls

    return register


def build(slot: str, description: Part | str | Mapping[str, Any]) -> Part:
    """A part from itself, from the name of its kind, or from what `to_dict` wrote.

    Raises:
        ValueError: an unknown kind or setting; the message lists near matches.
    """
    if isinstance(description, Part):
        if description.slot != slot:
            raise ValueError(
                f"{slot} must be a {slot} part, got the {description.slot} {description.kind!r}"
            )
        return description
    if not isinstance(description, (str, Mapping)):
        raise ValueError(f"{slot} must be a part, its kind or a mapping, got {description!r}")
    settings = {"kind": description} if isinstance(description, str) else dict(description)
    kind = settings.pop("kind", None)
    if not isinstance(kind, str) or kind not in PARTS[slot]:
        raise ValueError(f"unknown {slot} {kind!r}; {near(str(kind), PARTS[slot])}")
    cls = PARTS[slot][kind]
    for name in settings:
        if name not in cls.__dataclass_fields__:
            raise ValueError(
                f"{slot} {kind!r} has no setting {name!r}; {near(name, cls.__dataclass_fields__)}"
            )
    return cls(**{name: as_setting(value) for name, value in settings.items()})


def as_setting(value: Any) -> Any:
    """Lists, as files and the command line have them, as tuples: settings do not change."""
    return tuple(map(as_setting, value)) if isinstance(value, list) else value


def near(name: str, known: Mapping[str, Any]) -> str:
    """ "did you mean 'hold'?" or the list of all names."""
    matches = get_close_matches(name, list(known), n=3, cutoff=0.5)
    if matches:
        return "did you mean " + " or ".join(map(repr, matches)) + "?"
    return f"known: {', '.join(sorted(known)) or 'none'}"


def check_range(name: str, value: float, low: float, high: float = float("inf")) -> None:
    """Raises ValueError("threshold must be in [0, 1], got 1.4"); NaN and text are refused too."""
    if not isinstance(value, (int, float)) or not low <= value <= high:
        bounds = f"in [{low:g}, {high:g}]" if high != float("inf") else f"at least {low:g}"
        raise ValueError(f"{name} must be {bounds}, got {value!r}")


def check_count(name: str, value: float, low: int, high: float = float("inf")) -> None:
    """As `check_range`, and raises ValueError("interval must be a whole number, got 2.5")."""
    check_range(name, value, low, high)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, got {value!r}")


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

"""Frozen parts that a policy is composed of: their registry, and their form in files.

A part is a frozen dataclass whose fields are its only settings. In a file it is a mapping:
{"kind": "window_attention", "window": 32}. A field may hold parts of the same slot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, ClassVar, TypeVar


@dataclass(frozen=True, kw_only=True)
class SlotPart:
    """Base of every part; `slot` says where in a policy it goes, `kind` is its name in a file."""

    slot: ClassVar[str] = ""
    kind: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, **{f.name: _plain(getattr(self, f.name)) for f in fields(self)}}

    def describe(self) -> str:
        """The kind and its settings on one line: "window_attention(window=32)"."""
        values = ", ".join(f"{f.name}={_shown(getattr(self, f.name))}" for f in fields(self))
        return f"{self.kind}({values})" if values else self.kind


PartT = TypeVar("PartT", bound=SlotPart)
Registry = dict[str, dict[str, type[SlotPart]]]


def registered(registry: Registry, slot: str) -> Callable[[type[PartT]], type[PartT]]:
    """A decorator that registers a part of `slot` under its class name in snake_case."""

    def register(cls: type[PartT]) -> type[PartT]:
        cls.slot = slot
        cls.kind = re.sub(r"(?<=[a-z])(?=[A-Z0-9])", "_", cls.__name__).lower()
        known = registry[slot].get(cls.kind)
        if known is not None and known.__module__ != cls.__module__:
            raise ValueError(f"{slot} {cls.kind!r} is registered twice: rename one")
        registry[slot][cls.kind] = cls
        return cls

    return register


def build(registry: Registry, slot: str, description: Any) -> SlotPart:
    """A part from itself, from the name of its kind, or from what `to_dict` wrote.

    Raises:
        ValueError: an unknown kind or setting; the message lists near matches.
    """
    if isinstance(description, SlotPart):
        if description.slot != slot:
            raise ValueError(
                f"{slot} must be a {slot} part, got the {description.slot} {description.kind!r}"
            )
        return description
    if not isinstance(description, (str, Mapping)):
        raise ValueError(f"{slot} must be a part, its kind or a mapping, got {description!r}")
    settings = {"kind": description} if isinstance(description, str) else dict(description)
    kind = settings.pop("kind", None)
    if not isinstance(kind, str) or kind not in registry[slot]:
        raise ValueError(f"unknown {slot} {kind!r}; {near(str(kind), registry[slot])}")
    cls = registry[slot][kind]
    for name in settings:
        if name not in cls.__dataclass_fields__:
            raise ValueError(
                f"{slot} {kind!r} has no setting {name!r}; {near(name, cls.__dataclass_fields__)}"
            )
    try:
        return cls(**{name: as_setting(registry, slot, value) for name, value in settings.items()})
    except TypeError as error:  # a setting without a default is missing
        raise ValueError(f"{slot} {kind!r}: {error}") from error


def flat(pieces: Mapping[str, SlotPart]) -> dict[str, Any]:
    """Every setting by name; one that two parts share is written "gate.threshold"."""
    found: dict[str, list[tuple[str, Any]]] = {}
    for slot, piece in pieces.items():
        for f in fields(piece):
            found.setdefault(f.name, []).append((slot, getattr(piece, f.name)))
    settings: dict[str, Any] = {}
    for name, owners in found.items():
        for slot, value in owners:
            settings[name if len(owners) == 1 else f"{slot}.{name}"] = value
    return settings


def changed(
    registry: Registry, pieces: Mapping[str, SlotPart], policy: str, name: str, value: Any
) -> dict[str, SlotPart]:
    """{slot: part} of the one part of `policy` that has a setting, with the new value.

    Raises:
        ValueError: no part has it, or two have; the message lists near matches.
    """
    slot, _, setting = name.rpartition(".")
    owners = [s for s, piece in pieces.items() if setting in piece.__dataclass_fields__]
    owners = [owner for owner in owners if slot in ("", owner)]
    if len(owners) > 1:
        raise ValueError(
            f"{name!r} is a setting of {' and '.join(owners)}: write {owners[0]}.{name}"
        )
    if not owners:
        raise ValueError(f"policy {policy!r} has no setting {name!r}; {near(name, flat(pieces))}")
    new: Any = {setting: as_setting(registry, owners[0], value)}
    return {owners[0]: replace(pieces[owners[0]], **new)}


def near(name: str, known: Mapping[str, Any]) -> str:
    """ "did you mean 'drop'?" or the list of all names."""
    matches = get_close_matches(name, list(known), n=3, cutoff=0.5)
    if matches:
        return "did you mean " + " or ".join(map(repr, matches)) + "?"
    return f"known: {', '.join(sorted(known)) or 'none'}"


def check_range(name: str, value: Any, low: float, high: float = float("inf")) -> None:
    """Raises ValueError("threshold must be in [0, 1], got 1.4"); NaN and text are refused too."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high:
        bounds = f"in [{low:g}, {high:g}]" if high != float("inf") else f"at least {low:g}"
        raise ValueError(f"{name} must be {bounds}, got {value!r}")


def check_count(name: str, value: Any, low: int, high: float = float("inf")) -> None:
    """As `check_range`, and raises ValueError("window must be a whole number, got 2.5")."""
    check_range(name, value, low, high)
    if not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number, got {value!r}")


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raises ValueError("pool must be one of avg, max, got 'sum'")."""
    if value not in choices or isinstance(value, bool) != isinstance(choices[0], bool):
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def _plain(value: Any) -> Any:
    if isinstance(value, SlotPart):
        return value.to_dict()
    return [_plain(item) for item in value] if isinstance(value, (tuple, list)) else value


def _shown(value: Any) -> str:
    if isinstance(value, SlotPart):
        return value.describe()
    return f"({', '.join(map(_shown, value))})" if isinstance(value, tuple) else str(value)


def as_setting(registry: Registry, slot: str, value: Any) -> Any:
    """Lists as tuples, since settings do not change; a mapping with a kind as the part it is."""
    if isinstance(value, list):
        return tuple(as_setting(registry, slot, item) for item in value)
    return build(registry, slot, value) if isinstance(value, Mapping) and "kind" in value else value

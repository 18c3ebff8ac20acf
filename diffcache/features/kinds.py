"""Whether settings are of the kind that their annotation says: text is no number, 1 is no truth."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def check_kinds(settings: Any) -> None:
    """Raises ValueError("correct must be true or false, got 'off'") for a dataclass's fields."""
    for name, hint in _hints(settings.__class__).items():
        value = getattr(settings, name)
        if isinstance(value, float) and fits(0, hint):
            continue  # a number at least: what is wrong with it is for the settings to say
        if not fits(value, hint):
            raise ValueError(f"{name} must be {wanted(hint)}, got {value!r}")


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of the annotated kind; ranges and words are the settings' own to check."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(fits(value, option) for option in inner)
    if origin is Literal:
        return isinstance(value, str)
    if origin is tuple:
        return isinstance(value, (tuple, list)) and _all_fit(value, inner)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    plain = origin or hint
    return not isinstance(plain, type) or isinstance(value, plain)


def wanted(hint: Any) -> str:
    """The annotation in words: "a list of numbers or none"."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(wanted(option) for option in inner)
    if hint is NoneType:
        return "none"
    if origin is tuple:
        return f"a list of {'whole ' * (inner[0] is int)}numbers" if inner[0] in WORDS else "a list"
    return f"one of {', '.join(inner)}" if origin is Literal else WORDS.get(hint, str(hint))


def _all_fit(values: Any, inner: tuple[Any, ...]) -> bool:
    kinds = inner[:1] * len(values) if inner[-1] is ... else inner
    return len(values) == len(kinds) and all(map(fits, values, kinds))


@lru_cache
def _hints(cls: type) -> Mapping[str, Any]:
    fields = getattr(cls, "__dataclass_fields__", {})
    return {name: hint for name, hint in get_type_hints(cls).items() if name in fields}

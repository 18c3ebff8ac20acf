"""Named policies. Every module in features/policies/ is found by itself."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from .features import policies as _folder
from .parts import near
from .policy import Policy, load

_POLICIES: dict[str, Callable[[], Policy]] = {}


def register(make: Callable[[], Policy]) -> Callable[[], Policy]:
    """Registers a function without arguments under its own name; it returns the policy."""
    if make.__name__ in _POLICIES and _POLICIES[make.__name__].__module__ != make.__module__:
        raise ValueError(f"policy {make.__name__!r} is registered twice: rename one")
    _POLICIES[make.__name__] = make
    return make


@lru_cache(maxsize=1)
def _discover() -> None:
    for module in pkgutil.iter_modules(_folder.__path__):
        import_module(f"{_folder.__name__}.{module.name}")


def policies() -> tuple[str, ...]:
    """The names that `wrap` knows."""
    _discover()
    return tuple(sorted(_POLICIES))


def get_policy(policy: str | Path | Policy, **overrides: Any) -> Policy:
    """A policy from its name, its file or itself, with settings replaced.

    Raises:
        ValueError: unknown name (near matches are listed), unknown setting, value out of range.
    """
    if not isinstance(policy, Policy):
        policy = _named(str(policy))
    return policy.with_settings(**overrides) if overrides else policy


def _named(name: str) -> Policy:
    _discover()
    if name in _POLICIES:
        return _POLICIES[name]()
    if Path(name).suffix in (".json", ".yaml", ".yml"):
        return load(name)
    raise ValueError(f"unknown policy {name!r}; {near(name, _POLICIES)}")

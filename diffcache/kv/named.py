"""Named KV policies. Every module in kv/policies/ is found by itself."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from ..parts import near
from .policy import KVPolicy, load_kv_policy

Make = TypeVar("Make", bound=Callable[..., KVPolicy])
_POLICIES: dict[str, Callable[..., KVPolicy]] = {}


def register(make: Make) -> Make:
    """Registers a function whose arguments all have defaults under its policy's name.

    The name is the function's in lower case: SnapKV is "snapkv" for `wrap`.
    """
    name = make.__name__.lower()
    if name in _POLICIES and _POLICIES[name].__module__ != make.__module__:
        raise ValueError(f"KV policy {name!r} is registered twice: rename one")
    _POLICIES[name] = make
    return make


@lru_cache(maxsize=1)
def _discover() -> None:
    from . import policies as folder

    for module in pkgutil.iter_modules(folder.__path__):
        import_module(f"{folder.__name__}.{module.name}")


def kv_policies() -> tuple[str, ...]:
    """The names that `wrap` knows for a language model."""
    _discover()
    return tuple(sorted(_POLICIES))


def makers() -> dict[str, Callable[..., KVPolicy]]:
    """The functions that make named policies, by their own names: {"SnapKV": SnapKV, ...}."""
    _discover()
    return {make.__name__: make for make in _POLICIES.values()}


def get_kv_policy(policy: str | Path | KVPolicy, **overrides: Any) -> KVPolicy:
    """A KV policy from its name, its file or itself, with settings replaced.

    Raises:
        ValueError: unknown name (near matches are listed), unknown setting, value out of range.
    """
    if not isinstance(policy, KVPolicy):
        policy = _named(str(policy))
    return policy.with_settings(**overrides) if overrides else policy


def _named(name: str) -> KVPolicy:
    _discover()
    if name in _POLICIES:
        return _POLICIES[name]()
    if Path(name).suffix in (".json", ".yaml", ".yml"):
        return load_kv_policy(name)
    raise ValueError(f"unknown KV policy {name!r}; {near(name, _POLICIES)}")

"""The front door's way to language models; transformers is imported only where it already is."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from .kv.named import get_kv_policy
from .kv.policy import KVPolicy


def is_llm(target: Any) -> bool:
    """Whether `target` is a model of transformers that generates."""
    if "transformers" not in sys.modules or not hasattr(target, "generate"):
        return False
    from .pipelines.llm import is_llm as check

    return check(target)


def wrap(target: Any, policy: Any, strict: bool, overrides: dict[str, Any]) -> Any:
    """As `diffcache.wrap`; the policy is a KVPolicy, its name or its file."""
    from .pipelines.llm import wrap as install

    if not isinstance(policy, (str, Path, KVPolicy)):
        raise ValueError(
            f"a language model takes a KV policy, its name or its file, got {policy!r}; see "
            "diffcache.kv.kv_policies()"
        )
    install(target, get_kv_policy(policy, **overrides), strict)
    return target


def unwrap(target: Any) -> Any:
    from .pipelines.llm import state_of

    found = state_of(target)
    if found is not None:
        found.remove()
    return target


def state(target: Any) -> Any:
    """What stands on a wrapped model.

    Raises:
        ValueError: it is not wrapped.
    """
    from .pipelines.llm import state_of

    found = state_of(target)
    if found is None:
        name = type(target).__name__
        raise ValueError(f"this {name} is not wrapped: call diffcache.wrap on it first")
    return found

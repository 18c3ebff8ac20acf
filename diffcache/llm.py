"""The front door's way to language models; transformers is imported only where it already is."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

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


def kv_roles(model: Any, roles: Any) -> AbstractContextManager[None]:
    """Within, tokens of a wrapped language model have roles, for scorers and protection.

    Args:
        model: a wrapped language model.
        roles: whole numbers [batch, columns] from 0 to 127, as an attention mask runs over all
            tokens of the input; 0, and whatever lies beyond, is no role. What a number means is
            the caller's: images 2, pinned spans 7, as policies are told.

    Raises:
        ValueError: roles of another kind, or the model is not wrapped.
    """
    return cast(AbstractContextManager[None], state(model).marked(roles))


def load_cache(path: str | Path, model: Any) -> Any:
    """A compressed cache that its `save` wrote, maybe in another process, to go on with.

    Args:
        path: of the safetensors file.
        model: a wrapped language model like the one that filled it. The cache keeps its own policy.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not such a file, or of another model; the message names it.
    """
    found = state(model)
    from .pipelines.llm_files import load

    return load(path, found)


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

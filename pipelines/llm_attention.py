"""The attention function of a wrapped model, and its mask function.

Registered once, through transformers' public interfaces, under one name for each function that
they stand in front of. For models that are not wrapped they are that function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from diffcache.errors import DiffcacheError

from .llm_cache import handed

PREFIX = "diffcache_"
BEHIND = ("sdpa", "eager")


def ours(name: str | None) -> str:
    """The name of the attention that stands in front of `name`.

    Raises:
        ValueError: we cannot stand in front of it.
    """
    if name not in BEHIND:
        raise ValueError(
            f"attn_implementation must be sdpa or eager to compress the cache, got {name!r}: "
            "load the model with one of these"
        )
    register()
    return PREFIX + name


@functools.lru_cache(maxsize=1)
def register() -> None:
    for name, mask in (("sdpa", sdpa_mask), ("eager", eager_mask)):
        AttentionInterface.register(PREFIX + name, functools.partial(attend, behind=name))
        AttentionMaskInterface.register(PREFIX + name, mask)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    behind: str,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention over what the layer kept, then what the policy makes of the layer.

    Args:
        query: [batch, query heads, new, head_dim].
        key, value: [batch, heads, slots, head_dim], as the cache layer gave them, or as the model
            expanded them.
        attention_mask: over all columns ever seen.
    """
    forward = sdpa_attention_forward if behind == "sdpa" else _eager(module)
    layer = handed()
    if layer is None:
        return forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if key.shape[2] != layer.slots:
        raise DiffcacheError(
            f"{type(module).__name__} got {key.shape[2]} keys where the cache gave {layer.slots}: "
            "this model cannot be compressed, unwrap it"
        )
    mask = layer.mask(attention_mask, query)
    result = forward(module, query, key, value, mask, scaling=scaling, **kwargs)
    layer.attended(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling)
    return result


def _eager(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The function that transformers takes for "eager" in the model's own file."""
    source = sys.modules[type(module).__module__]
    forward = getattr(source, "eager_attention_forward", None)
    if forward is None:
        raise DiffcacheError(
            f"{source.__name__} has no eager_attention_forward: load the model with "
            'attn_implementation="sdpa"'
        )
    return forward

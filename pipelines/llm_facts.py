"""What a transformers decoder tells a KV policy of each layer's attention."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from diffcache.kv.layer_view import Facts

OUTPUTS = ("o_proj", "out_proj", "dense")


def facts(decoder: nn.Module, kinds: list[type]) -> list[Facts]:
    """One for each cache layer; layers are numbered over those that are compressed."""
    modules: dict[Any, nn.Module] = {
        module.layer_idx: module
        for module in decoder.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "scaling")
    }
    compressed = [number for number, kind in enumerate(kinds) if kind is DynamicLayer]
    found = []
    for number in range(len(kinds)):
        module = modules.get(number)
        found.append(
            Facts(
                layer=compressed.index(number) if number in compressed else number,
                num_layers=len(compressed),
                rotate=None if module is None else _rotation(decoder, module),
                output_weight=None if module is None else _output(module),
            )
        )
    return found


def _output(module: nn.Module) -> Callable[[], Tensor] | None:
    """[query heads, head_dim, hidden] of the output projection."""
    name = next((name for name in OUTPUTS if hasattr(module, name)), None)
    return None if name is None else partial(_heads, getattr(module, name), module)


def _heads(projection: Any, module: Any) -> Tensor:
    size = getattr(module, "v_head_dim", None) or module.head_dim
    return projection.weight.T.unflatten(0, (-1, size))


def _rotation(decoder: nn.Module, module: nn.Module) -> Callable[..., Tensor] | None:
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    rotary = getattr(decoder, "rotary_emb", None)
    return None if apply is None or rotary is None else partial(_rotate, rotary, apply)


def _rotate(
    rotary: Any, apply: Callable[..., Any], x: Tensor, positions: Tensor, inverse: bool
) -> Tensor:
    """`x` [batch, heads, n, head_dim] rotated by positions [axes, batch, n], or back.

    The model's own embedding and its own way of applying it, so partial and interleaved rotations
    and three axes are what they are in the model.
    """
    cos, sin = rotary(x, positions[0] if positions.shape[0] == 1 else positions)
    if not inverse:
        return apply(x, x, cos, sin)[0]
    scale = getattr(rotary, "attention_scaling", 1.0) ** 2
    return apply(x, x, cos / scale, -sin / scale)[0]

"""What a transformers decoder tells a KV policy of each layer's attention."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from diffcache.kv.layer_view import Facts
from diffcache.kv.policy import KVPolicy
from diffcache.kv.sizes import token_bytes

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
                rotate=None if module is None else _rotation(decoder, module, number),
                output_weight=None if module is None else _output(module),
            )
        )
    return found


def model_sizes(config: Any) -> dict[str, Any]:
    """What must agree between the model that filled a cache and the one that goes on."""
    each = token_bytes(config, 1)
    return {"type": config.model_type, "layers": config.num_hidden_layers, "numbers": each}


def _output(module: nn.Module) -> Callable[[], Tensor] | None:
    """[query heads, head_dim, hidden] of the output projection."""
    name = next((name for name in OUTPUTS if hasattr(module, name)), None)
    return None if name is None else partial(_heads, getattr(module, name), module)


def _heads(projection: Any, module: Any) -> Tensor:
    size = getattr(module, "v_head_dim", None) or module.head_dim
    return projection.weight.T.unflatten(0, (-1, size))


def _rotation(decoder: Any, module: nn.Module, number: int) -> Callable[..., Tensor] | None:
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    rotary = getattr(decoder, "rotary_emb", None)
    if apply is None or rotary is None or hasattr(module, "kv_lora_rank"):
        return None  # of latents only a part of each query is rotated
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        rotary = partial(rotary, layer_type=decoder.config.layer_types[number])
    return partial(_rotate, rotary, apply)


def _rotate(
    rotary: Any, apply: Callable[..., Any], x: Tensor, positions: Tensor, inverse: bool
) -> Tensor:
    """`x` [batch, heads, n, head_dim] rotated by positions [axes, batch, n], or back.

    The model's own embedding and its own way of applying it, so interleaved rotations and three
    axes are what they are in the model. What of the head is not rotated comes last.
    """
    cos, sin = rotary(x, positions[0] if positions.shape[0] == 1 else positions)
    part, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    if inverse:  # the embedding may scale, too
        scale = (cos.square() + sin.square()).amax()
        cos, sin = cos / scale, -sin / scale
    return torch.cat([apply(part, part, cos, sin)[0], rest], -1)


def check_needs(policy: KVPolicy, known: list[Facts], model: str) -> None:
    """Raises ValueError where a scorer needs what the model cannot tell."""
    for fact in known:
        if policy.scorer.projects and fact.output_weight is None:
            raise ValueError(f"{policy.scorer.kind} needs an output projection; {model} has none")
        if policy.scorer.rotates and fact.rotate is None:
            raise ValueError(
                f"{policy.scorer.kind} needs queries before rotation, which {model} does not "
                "give back: take another scorer"
            )

"""Reads TeaCache's time signals off a denoiser's call, through its own submodules alone."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from diffcache.signals import SignalCall


def read_signal(call: SignalCall, kind: str | None) -> Tensor | None:
    """The time signal of one call; None where this denoiser does not show it.

    Args:
        kind: "embedding": what the timestep is embedded as, [1, D] (Wan), or the blocks' `temb`;
            "modulation": what Wan's blocks get of it, [1, 6 D]; "input": the first block's hidden
            states, normed and modulated as that block does it, or as they are where it does
            neither.
    """
    if kind == "input":
        return None if call.block is None else _modulated_input(call)
    embedder = getattr(_inner(call.module), "condition_embedder", None)
    if all(hasattr(embedder, name) for name in ("timesteps_proj", "time_embedder", "time_proj")):
        return _wan_embedding(embedder, call.timestep, modulation=kind == "modulation")
    return _arguments(call).get("temb") if kind == "embedding" else None


def _wan_embedding(embedder: Any, timestep: float, modulation: bool) -> Tensor:
    """Wan's embedding of a timestep; the published code compares these, not what it modulates."""
    weight = next(embedder.time_embedder.parameters())
    # Weights on meta are brought by hooks; quantized ones do not tell what to compute in.
    device = torch.device("cpu") if weight.is_meta else weight.device
    times = embedder.timesteps_proj(torch.tensor([timestep], device=device))
    if weight.dtype.is_floating_point and weight.dtype.itemsize > 1:
        times = times.to(weight.dtype)
    embedding: Tensor = embedder.time_embedder(times)
    return embedder.time_proj(embedder.act_fn(embedding)) if modulation else embedding


def _modulated_input(call: SignalCall) -> Tensor | None:
    """What the first block's attention is given: norm(h), scaled and shifted by the time."""
    arguments = _arguments(call)
    hidden, temb = arguments.get("hidden_states"), arguments.get("temb")
    block: Any = _inner(call.block)
    if not isinstance(hidden, Tensor):
        return next((value for value in arguments.values() if isinstance(value, Tensor)), None)
    norm, table = getattr(block, "norm1", None), getattr(block, "scale_shift_table", None)
    if not isinstance(norm, nn.Module) or not isinstance(temb, Tensor):
        return hidden
    if isinstance(table, Tensor):
        return _shifted(norm(hidden), table, temb)
    names = inspect.signature(type(norm).forward).parameters
    if "emb" not in names and len(names) != 3:  # self, hidden states, temb
        return hidden
    given = ((hidden,), {"emb": temb}) if "emb" in names else ((hidden, temb), {})
    normed = functional_call(norm, _beside(norm, hidden), *given)
    found: Tensor = normed[0] if isinstance(normed, tuple) else normed
    return found


def _beside(norm: nn.Module, hidden: Tensor) -> dict[str, Tensor]:
    """Weights that group offload has not brought over yet: it waits for the block's own call."""
    away = {name: p for name, p in norm.named_parameters() if p.device != hidden.device}
    return {name: p.to(hidden.device) for name, p in away.items() if not p.is_meta}


def _shifted(normed: Tensor, table: Tensor, temb: Tensor) -> Tensor:
    """normed * (1 + scale) + shift: the first two of the rows that LTX's and Wan's blocks add up.

    Args:
        normed: [B, tokens, D].
        table: [6, D] or [1, 6, D].
        temb: [B, 6, D], [B, tokens or 1, 6 D] or [B, tokens, 6, D].
    """
    rows = table.reshape(-1, table.shape[-1])
    times = temb.reshape(temb.shape[0], -1, *rows.shape)
    values = rows.to(times.device) + times
    return normed * (1 + values[:, :, 1]) + values[:, :, 0]


def _arguments(call: SignalCall) -> dict[str, Any]:
    """The first block's arguments by name."""
    if call.block is None:
        return {}
    names = _names(type(_inner(call.block)))  # type: ignore[arg-type]
    return {**dict(zip(names, call.args, strict=False)), **call.kwargs}


@lru_cache(maxsize=64)
def _names(block: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(block.forward).parameters)[1:]


def _inner(module: Any) -> Any:
    return getattr(module, "_orig_mod", module)

"""Recognises the passes that leave keys and values behind, by what a model's forward is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

# Words in a `kv_cache_mode` that writes (SANA-WM's refiner, Wan-Animate 2).
WRITING_MODES = ("capture", "extract")


def writes_kv(
    arguments: Mapping[str, Any], timestep: Any = None, context_noise: float = 0.0
) -> bool:
    """Whether a call is a clean pass, which must be computed in full.

    A flag decides where there is one: `kv_cache_flag["is_cache_step"]` (AnyFlow FAR), a
    `kv_cache_mode` (SANA-WM's refiner, Wan-Animate 2) or `updating_cache` (Rolling Forcing,
    arXiv 2509.25161). Without one, a call that carries a `kv_cache` writes it where no timestep is
    above `context_noise` (Self-Forcing's name, arXiv 2506.08009, and its default 0).

    Args:
        arguments: of the forward, by name.
        timestep: a number or a tensor of any shape, in the model's own units.
        context_noise: the timestep at which clean frames are encoded.
    """
    mode, flag = arguments.get("kv_cache_mode"), arguments.get("kv_cache_flag")
    if isinstance(mode, str):
        return any(word in mode for word in WRITING_MODES)
    if isinstance(flag, Mapping) and "is_cache_step" in flag:
        return bool(flag["is_cache_step"])
    if arguments.get("updating_cache") is not None:
        return bool(arguments["updating_cache"])
    if arguments.get("kv_cache") is None or timestep is None:
        return False
    highest = float(timestep.max()) if isinstance(timestep, Tensor) else float(timestep)
    return highest <= context_noise

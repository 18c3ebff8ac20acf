"""Finds the denoisers of a pipeline: the modules that are called with a timestep in its loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from diffcache.signature import TIMESTEP_NAMES

# Called with a timestep too, but they feed the denoiser instead of being it.
HELPERS = ("controlnet", "adapter", "image_encoder", "text_encoder", "vae")


def is_pipeline(target: Any) -> bool:
    """Whether `target` has named components, as a diffusers pipeline does."""
    return not isinstance(target, nn.Module) and isinstance(
        getattr(target, "components", None), dict
    )


def denoisers(pipeline: Any) -> dict[str, nn.Module]:
    """Denoisers by component name, in the pipeline's order; missing ones (None) are left out."""
    return {
        name: component
        for name, component in pipeline.components.items()
        if isinstance(component, nn.Module)
        and not any(word in name for word in HELPERS)
        and takes_timestep(component)
    }


def takes_timestep(module: nn.Module) -> bool:
    """Whether the forward of this module (below a `torch.compile` wrapper) names a timestep."""
    inner = getattr(module, "_orig_mod", module)
    names = inspect.signature(type(inner).forward).parameters
    return any(name in names for name in TIMESTEP_NAMES)


def guidance_scale(pipeline: Any, name: str) -> float:
    """The scale with which the passes of this denoiser are combined now; 1 where none is told."""
    second = getattr(pipeline, "_guidance_scale_2", None) if name == "transformer_2" else None
    scale = getattr(pipeline, "guidance_scale", None) if second is None else second
    return 1.0 if scale is None else float(scale)


def served_timesteps(pipeline: Any, name: str) -> Callable[[float], bool] | None:
    """Which timesteps go to this denoiser where two experts share the loop (Wan 2.2); else None."""
    ratio = getattr(getattr(pipeline, "config", None), "boundary_ratio", None)
    if ratio is None or name not in ("transformer", "transformer_2"):
        return None
    boundary = ratio * pipeline.scheduler.config.num_train_timesteps
    return (lambda t: t >= boundary) if name == "transformer" else (lambda t: t < boundary)

"""Finds the denoisers of a pipeline: the modules that are called with a timestep in its loop."""

from __future__ import annotations

import inspect
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

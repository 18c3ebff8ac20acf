"""diffcache: training-free caching for video diffusion, world models and multimodal LLMs."""

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import Any as _Any

# In a checkout, diffcache.kernels, .pipelines and .world_models are the sibling folders.
if not _Path(__file__).with_name("pipelines").is_dir():
    __path__.append(str(_Path(__file__).parents[1]))

__version__ = "0.1.0"

# Public name -> the module that defines it; loaded at first use.
_EXPORTS = {
    "wrap": "api",
    "unwrap": "api",
    "reset": "api",
    "report": "api",
    "disabled": "api",
    "chunk": "api",
    "kv_write": "api",
    "load": "policy",
    "kv_roles": "llm",
    "load_cache": "llm",
    "Policy": "policy",
    "policies": "registry",
    "get_policy": "registry",
    "CallContext": "context",
    "Report": "records",
    "DiffcacheError": "errors",
    "DiffcacheWarning": "errors",
}
_ROOMS = ("calibrate", "kv", "magnitudes")  # modules with public names of their own
__all__ = sorted((*_EXPORTS, *_ROOMS))


def __getattr__(name: str) -> _Any:
    if name in _ROOMS:
        return _import_module(f"{__name__}.{name}")
    if name in _EXPORTS:
        value = getattr(_import_module(f"{__name__}.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

"""Key and value caches, tensors only: score, budget, compress, store; and the rolling cache."""

from importlib import import_module as _import_module
from typing import Any as _Any

# Public name -> the module that defines it; loaded at first use.
_EXPORTS = {
    "Admission": "admission",
    "AdmissionRefused": "session",
    "Positions": "positions",
    "RollingCache": "rolling",
    "RollingSettings": "settings",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> _Any:
    if name in _EXPORTS:
        value = getattr(_import_module(f"{__name__}.{_EXPORTS[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

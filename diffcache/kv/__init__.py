"""Key and value caches, tensors only: score, budget, compress, store; and the rolling cache."""

from importlib import import_module as _import_module
from typing import Any as _Any

# Public name -> the module that defines it; loaded at first use.
_EXPORTS = {
    "Admission": "admission",
    "AdmissionRefused": "session",
    "KVPolicy": "policy",
    "KVReport": "report",
    "Positions": "positions",
    "RollingCache": "rolling",
    "RollingSettings": "settings",
    "get_kv_policy": "named",
    "held_bytes": "ledger",
    "kv_bytes": "sizes",
    "kv_policies": "named",
    "load_kv_policy": "policy",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> _Any:
    if name in _EXPORTS:
        value = getattr(_import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    elif name.startswith("_") or not name[:1].isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:  # SnapKV, KeyDiff, ...: whatever is found in policies/
        value = _import_module(f"{__name__}.named").makers().get(name)
        if value is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_import_module(f"{__name__}.named").makers()})

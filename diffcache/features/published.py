"""Published numbers of single models, as data: TeaCache's polynomials, MagCache's curves.

`teacache.json` and `magcache.json` are keyed by the name that `pipelines/families.py` gives a
denoiser; each entry names the repository and commit it was read in.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..parts import near

UNKNOWN = ""  # the `model` of a denoiser that nothing was published for


def published(method: str, model: str | None) -> Mapping[str, Any] | None:
    """The entry of a model in `method`.json; None where there is none."""
    return _entries(method).get(model or UNKNOWN)


def check_model(method: str, model: str | None) -> None:
    """Raises ValueError for the name of a model that nothing was published for."""
    if model and model not in _names():
        raise ValueError(f"{method} knows no model {model!r}; {near(model, _names())}")


@lru_cache
def _entries(method: str) -> Mapping[str, Any]:
    path = Path(__file__).with_name(f"{method}.json")
    entries: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return entries


@lru_cache
def _names() -> Mapping[str, Any]:
    return {**_entries("teacache"), **_entries("magcache")}

"""Makers of contexts and cells, so that a part can be tried without a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diffcache import CallContext, Policy
from diffcache.features.cell import Cell
from diffcache.features.store import TensorStore

BASE = CallContext(
    branch="cond",
    chunk=None,
    step=0,
    branch_step=0,
    timestep=0.0,
    sigma=None,
    time=0.0,
    pass_kind="denoise",
    num_steps=None,
    new=None,
)


@pytest.fixture
def at() -> Callable[..., CallContext]:
    """Makes the context of one step; `time` follows the step unless it is given."""

    def make(step: int, num_steps: int | None = None, **fields: Any) -> CallContext:
        fields = {"branch_step": step, "timestep": float(-step), "time": float(-step), **fields}
        return replace(BASE, step=step, num_steps=num_steps, **fields)

    return make


@pytest.fixture
def cell_of() -> Callable[..., Cell]:
    """Makes an empty cell under a policy of given parts, without guards unless they are given."""

    def make(**parts: Any) -> Cell:
        guards = {"kind": "guards", "warmup_steps": 0, "min_steps": 0}
        defaults = {"site": "model", "gate": "interval", "predictor": "hold", "guards": guards}
        policy = Policy(**{**defaults, **parts})
        return Cell(policy, TensorStore(policy.store))

    return make

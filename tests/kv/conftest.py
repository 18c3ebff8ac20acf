"""A small rolling cache, chunks for it, and a readable reference that keeps everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv import RollingCache

TOKENS, HEADS, DIM = 3, 2, 4
SMALL = {
    "num_layers": 2,
    "num_heads": HEADS,
    "head_dim": DIM,
    "frame_tokens": TOKENS,
    "storage": "float32",
    "dtype": "float32",
}


class ListCache:
    """One item of one layer: every frame in a list; what is visible is picked when asked."""

    def __init__(self, sink_size: int, window_size: int) -> None:
        self.sink_size, self.window_size = sink_size, window_size
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def append(self, keys: Tensor, values: Tensor) -> None:
        self.keys += keys.split(TOKENS)
        self.values += values.split(TOKENS)

    def visible(self) -> list[int]:
        end = len(self.keys)
        return [f for f in range(end) if f < self.sink_size or f >= end - self.window_size]


@pytest.fixture
def make() -> Callable[..., RollingCache]:
    def make(sink_size: int = 1, window_size: int = 3, **settings: Any) -> RollingCache:
        return RollingCache(sink_size, window_size, **{**SMALL, **settings})

    return make


@pytest.fixture
def chunk() -> Callable[..., tuple[Tensor, Tensor]]:
    """Random keys and values of some frames, from one seeded stream per test."""
    generator = torch.Generator().manual_seed(0)

    def chunk(frames: int, items: int = 1) -> tuple[Tensor, Tensor]:
        shape = (2, items, frames * TOKENS, HEADS, DIM)
        keys, values = torch.randn(shape, generator=generator)
        return keys, values

    return chunk


@pytest.fixture
def reference() -> type[ListCache]:
    return ListCache


@pytest.fixture
def in_time() -> Callable[..., tuple[list[int], Tensor, Tensor]]:
    """Frames, keys and values of one item of a view, padding dropped, in order of time."""

    def in_time(view: Any, item: int = 0) -> tuple[list[int], Tensor, Tensor]:
        frames = view.frames[item]
        order = sorted((n for n, f in enumerate(frames) if f >= 0), key=lambda n: frames[n])
        keys, values = (x[item].unflatten(0, (-1, TOKENS))[order] for x in (view.keys, view.values))
        return [frames[n] for n in order], keys, values

    return in_time

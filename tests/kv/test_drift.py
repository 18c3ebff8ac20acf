"""200 chunks: what is kept reads as if it had been stored once and rotated once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv import RollingCache
from diffcache.kv.codec import decode, encode

Make = Callable[..., RollingCache]
MODES = ["keep", "relative", "anchor", "renumber"]


def rotate(x: Tensor, position: int) -> Tensor:
    """Rotary embedding of [..., 4] at one position, in the precision of `x`."""
    angles = torch.tensor([1.0, 0.1]) * position
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :2], x[..., 2:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("storage", ["bfloat16", "int8", "float8_e4m3"])
def test_every_read_is_the_original_coded_once_and_rotated_once(
    make: Make, chunk: Any, mode: str, storage: str
) -> None:
    table = 220 if mode in ("keep", "anchor") else 16
    cache = make(2, 4, storage=storage, positions=mode, max_position=table, device_size=3)
    given: list[Tensor] = []
    for step in range(200):
        keys, values = chunk(1)
        given.append(decode(*encode(keys[0], storage), torch.float32))
        cache.append(0, keys, values)
        if step % 7 == 3:  # there and back: moves between tiers, copies, states
            snapshot = cache.snapshot()
            cache.append(0, *chunk(3))
            cache.rollback(snapshot)
        if step % 50 == 49:
            cache = copy.deepcopy(cache)
        view = cache.read(0, 1)
        assert len(view.frames[0]) == min(step + 1, 6)
        for n, (frame, position) in enumerate(zip(view.frames[0], view.positions[0], strict=True)):
            found = rotate(view.keys[0, 3 * n : 3 * n + 3], position)
            assert torch.equal(found, rotate(given[frame], position))


def test_rotating_what_was_rotated_would_drift() -> None:
    """What the test above would see of a cache that turned its stored keys on at each chunk."""
    keys = torch.randn(300, 4, generator=torch.Generator().manual_seed(0))
    once = rotate(keys, 200)
    stepped = keys.bfloat16()
    for _ in range(200):
        stepped = rotate(stepped, 1)
    drift = (stepped.float() - once).norm() / once.norm()
    single = (rotate(keys.bfloat16(), 200).float() - once).norm() / once.norm()
    assert single < 0.01 < 0.03 < drift


@pytest.mark.parametrize("storage", ["int8", "float8_e4m3"])
def test_writing_back_what_was_read_for_200_chunks_does_not_drift(
    make: Make, chunk: Any, storage: str
) -> None:
    cache = make(2, 2, storage=storage)
    cache.append(0, *chunk(2))
    first = cache.read(0, 1).keys
    for _ in range(200):
        view = cache.read(0, 1, items=[0])
        cache.rewrite(0, [0, 1], view.keys[:, :6], view.values[:, :6])
        cache.append(0, *chunk(1))
    torch.testing.assert_close(cache.read(0, 1).keys[:, :6], first, rtol=1e-5, atol=0)

"""Two tiers: what lies where, to the frame and to the byte, and that reading does not tell."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffcache.kv import RollingCache

Make = Callable[..., RollingCache]
FRAME = 2 * 3 * 2 * 4 * 4  # K and V, tokens, heads, head_dim, fp32


@pytest.mark.parametrize("scopes", ["sink+window", "recent_4+anchor", "recent_2+anchor", "anchor"])
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_tiers_read_as_one_and_hold_the_newest_near(
    make: Make, chunk: Any, in_time: Any, scopes: str, storage: str
) -> None:
    random.seed(6)
    settings: dict[str, Any] = {"batch_size": 2, "scopes": scopes, "storage": storage}
    one, two = make(1, 5, **settings), make(1, 5, **settings, device_size=2, page_tokens=1)
    for _ in range(60):
        items = random.sample(range(2), random.randrange(1, 3))
        keys, values = chunk(random.randrange(1, 9), len(items))
        for layer in range(2):
            one.append(layer, keys + layer, values, items=items)
            two.append(layer, keys + layer, values, items=items)
        for layer in range(2):  # each layer gets its own rows back
            for item in range(2):
                near, far = in_time(one.read(layer, 1), item), in_time(two.read(layer, 1), item)
                assert near[0] == far[0]
                assert torch.equal(near[1], far[1]) and torch.equal(near[2], far[2])
                sinks = one.settings.layers[layer].sinks
                order = sorted(near[0], key=lambda frame: (frame >= sinks, -frame))
                assert two.on_host(layer, item) == sorted(order[2:])
        if two.frames(0, 0):
            page = 3 * len(two.frames(0, 0)) - 1
            view = two.read(0, 1, items=[0], pages=[[page]])
            assert torch.equal(view.keys, two.read(0, 1, items=[0]).keys[:, [page]])


def test_bytes_of_each_tier_are_the_formula(make: Make, chunk: Any) -> None:
    cache = make(1, 5, device_size=2, page_tokens=3)
    summaries = 3 * 2 * 4 * 4
    for _ in range(20):
        assert cache.host_nbytes == cache.settings.host_nbytes() == 2 * 4 * FRAME
        assert cache.nbytes == cache.settings.nbytes() == 2 * 6 * (FRAME + summaries)
        cache.append(0, *chunk(2))


def test_one_frame_moves_for_each_that_comes(make: Make, chunk: Any) -> None:
    cache = make(1, 5, device_size=3)
    cache.append(0, *chunk(6))
    for _ in range(12):
        written = cache.bytes_written
        cache.append(0, *chunk(1))
        assert cache.bytes_written - written == 2 * FRAME


def test_rollback_and_state_cross_the_tiers(make: Make, chunk: Any, in_time: Any) -> None:
    random.seed(7)
    cache = make(1, 5, device_size=2, page_tokens=1)
    for _ in range(20):
        cache.append(0, *chunk(random.randrange(1, 4)))
        snapshot, state = cache.snapshot(), cache.state_dict()
        before, far = in_time(cache.read(0, 1)), cache.on_host(0)
        before = before[0], before[1].clone(), before[2].clone()
        for _ in range(random.randrange(1, 4)):
            cache.append(0, *chunk(random.randrange(1, 8)))
        cache.rollback(snapshot)
        other = make(1, 5, device_size=2, page_tokens=1)
        other.load_state_dict(state)
        for one in (cache, other):
            found = in_time(one.read(0, 1))
            assert found[0] == before[0] and one.on_host(0) == far
            assert torch.equal(found[1], before[1]) and torch.equal(found[2], before[2])


def test_a_device_too_small_for_the_sinks_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="device_size must be an integer of at least 3, got 2"):
        make(2, 5, device_size=2)

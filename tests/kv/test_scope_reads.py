"""The seven actions of ReCaVSR in a cache: a layer reads what its name promises and no more."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffcache.kv import RollingCache

Make = Callable[..., RollingCache]
# What the paper's names promise of the frames made so far, by hand.
ACTIONS: dict[str, Callable[[int], set[int]]] = {
    "none": lambda end: set(),
    "recent_1": lambda end: last(end, 1),
    "recent_2": lambda end: last(end, 2),
    "recent_4": lambda end: last(end, 4),
    "anchor": lambda end: anchors(end),
    "recent_2+anchor": lambda end: last(end, 2) | anchors(end),
    "recent_4+anchor": lambda end: last(end, 4) | anchors(end),
}
NAMES = tuple(ACTIONS)


def last(end: int, count: int) -> set[int]:
    return set(range(max(0, end - count), end))


def anchors(end: int) -> set[int]:
    """The last two frames i with (i - 5) mod 6 = 0; frame -1 is none."""
    return set([i for i in range(end) if (i - 5) % 6 == 0][-2:])


def poison(cache: RollingCache) -> None:
    """NaN into every slot that holds no frame, so that a read of one would show."""
    for layer, rings in enumerate(cache._rings):
        store = cache._stores[layer]
        for item, ring in enumerate(rings):
            for slot, frame in enumerate(ring.frames):
                if frame < 0:
                    for name in store.parts:
                        store._at(name, (item, slot)).fill_(float("nan"))


@pytest.mark.parametrize("longest", [1, 3, 9])
@pytest.mark.parametrize("host", [None, 1])
def test_each_layer_reads_its_frames_and_nothing_else(
    make: Make, chunk: Any, in_time: Any, longest: int, host: int | None
) -> None:
    rng = random.Random(longest)
    cache = make(0, 6, num_layers=7, scopes=NAMES, device_size=host, batch_size=2)
    given: list[list[torch.Tensor]] = [[], []]
    for _ in range(40):
        item, frames = rng.randrange(2), rng.randrange(1, longest + 1)
        keys, values = chunk(frames)
        given[item] += keys[0].split(3)
        for layer in rng.sample(range(7), 7):
            cache.append(layer, keys + layer, values, items=[item])
        poison(cache)
        for layer, name in enumerate(NAMES):
            view = cache.read(layer, 1)
            for row in range(2):
                found, read, _ = in_time(view, row)
                assert found == sorted(ACTIONS[name](len(given[row])))
                assert found == cache.frames(layer, row)
                for frame, content in zip(found, read, strict=True):
                    assert torch.equal(content, given[row][frame] + layer)
            assert not view.keys.isnan().any() and not view.values.isnan().any()


def test_bytes_are_those_of_the_most_frames_that_a_layer_ever_holds(make: Make, chunk: Any) -> None:
    cache = make(0, 6, num_layers=7, scopes=NAMES)
    most = [max(len(kept(end)) for end in range(60)) for kept in ACTIONS.values()]
    assert most == [0, 1, 2, 4, 2, 4, 6]
    frame = 2 * 3 * 2 * 4 * 4  # K and V, tokens, heads, head_dim, fp32
    assert [store.nbytes for store in cache._stores] == [frame * count for count in most]


def test_a_layer_that_keeps_nothing_writes_nothing(make: Make, chunk: Any) -> None:
    cache = make(0, 6, num_layers=1, scopes="none", storage="int8")
    for _ in range(5):
        cache.append(0, *chunk(3))
    assert cache.bytes_written == 0 and cache.next_frame(0) == 15

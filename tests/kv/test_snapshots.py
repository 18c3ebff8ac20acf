"""Snapshot and rollback at any point, and state that goes on in another process, to the bit."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diffcache.kv import RollingCache

Make = Callable[..., RollingCache]
STORAGE = ["float32", "bfloat16", "float8_e4m3", "int8"]
SCOPES = ("sink+window", "recent_2+anchor")


def content(cache: RollingCache) -> list[Any]:
    """All that a reader can see, to compare bit by bit."""
    seen: list[Any] = []
    for layer in range(cache.settings.num_layers):
        for item in range(cache.settings.batch_size):
            view = cache.read(layer, 1, items=[item])
            seen += [view.frames, view.positions, view.chunk_positions, view.keys.tolist()]
            seen += [view.values.tolist(), cache.next_frame(layer, item)]
    return seen


def roll(cache: RollingCache, chunk: Any, steps: int, rng: random.Random) -> None:
    for _ in range(steps):
        items = rng.sample(range(2), rng.randrange(1, 3))
        keys, values = chunk(rng.randrange(1, 6), len(items))
        for layer in range(2):
            cache.append(layer, keys, values, items=items)


@pytest.mark.parametrize("storage", STORAGE)
def test_rollback_at_any_point_and_in_any_order(make: Make, chunk: Any, storage: str) -> None:
    rng = random.Random(storage)
    cache = make(2, 3, batch_size=2, storage=storage, scopes=SCOPES)
    for _ in range(15):
        moments = []
        for _ in range(3):
            moments.append((cache.snapshot(), content(cache)))
            roll(cache, chunk, rng.randrange(4), rng)
        for _ in range(5):
            snapshot, seen = rng.choice(moments)
            cache.rollback(snapshot)
            assert content(cache) == seen
            roll(cache, chunk, rng.randrange(3), rng)


def test_the_same_chunks_after_a_rollback_give_the_same_bits(make: Make, chunk: Any) -> None:
    cache = make(1, 3, batch_size=1, storage="int8")
    for _ in range(6):
        cache.append(0, *chunk(1))
    chunks = [chunk(2) for _ in range(4)]
    snapshot = cache.snapshot()
    for keys, values in chunks:
        cache.append(0, keys, values)
    first = content(cache)
    cache.rollback(snapshot)
    assert content(cache) != first
    for keys, values in chunks:
        cache.append(0, keys, values)
    assert content(cache) == first


def test_a_snapshot_costs_what_was_overwritten_and_nothing_once_dropped(
    make: Make, chunk: Any
) -> None:
    cache, frame = make(1, 3), 2 * 3 * 2 * 4 * 4
    slots = cache.settings.nbytes()
    cache.append(0, *chunk(2))
    snapshot = cache.snapshot()
    cache.append(0, *chunk(2))
    assert cache.nbytes == slots, "empty slots are not saved"
    cache.append(0, *chunk(1))
    assert cache.nbytes == slots + frame == slots + snapshot.nbytes
    for _ in range(9):
        cache.append(0, *chunk(1))
    assert cache.nbytes == slots + frame, "the sink was never overwritten"
    cache.rollback(snapshot)
    assert cache.nbytes == slots and cache.frames(0) == [0, 1]
    cache.append(0, *chunk(9))
    assert cache.nbytes == slots + frame
    del snapshot
    gc.collect()
    assert cache.nbytes == slots


@pytest.mark.parametrize("tiers", [{}, {"device_size": 3, "page_tokens": 1}])
def test_what_snapshots_will_add_is_known_before_the_chunk(
    make: Make, chunk: Any, tiers: dict[str, Any]
) -> None:
    rng = random.Random(4)
    cache = make(2, 3, batch_size=2, storage="int8", scopes=SCOPES, **tiers)
    moments, grown = [], 0
    for _ in range(60):
        if rng.random() < 0.4:
            moments.append(cache.snapshot())
        if moments and rng.random() < 0.2:
            cache.rollback(moments.pop(rng.randrange(len(moments))))
        count, items = rng.randrange(1, 6), rng.sample(range(2), rng.randrange(1, 3))
        before, growth = cache.nbytes, cache.snapshot_growth(count, items)
        keys, values = chunk(count, len(items))
        for layer in range(2):
            cache.append(layer, keys, values, items=items)
        assert cache.nbytes == before + growth
        grown += growth > 0
    assert 5 < grown < 60, "some chunks added bytes, some did not"


def test_rollback_undoes_clear_and_rewrite(make: Make, chunk: Any) -> None:
    cache = make(1, 3)
    cache.append(0, *chunk(4))
    snapshot, seen = cache.snapshot(), content(cache)
    cache.rewrite(0, [0, 2], *chunk(2))
    cache.clear()
    assert cache.frames(0) == [] and cache.next_frame() == 0
    cache.append(0, *chunk(3))
    cache.rollback(snapshot)
    assert content(cache) == seen


def test_another_caches_snapshot_is_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="of another cache"):
        make().rollback(make().snapshot())


CONTINUE = """
import sys, torch
from diffcache.kv import RollingCache
state, chunks = torch.load(sys.argv[1], weights_only=True)
settings = {**state["settings"]}
cache = RollingCache(**settings)
cache.load_state_dict(state)
for keys, values in chunks:
    cache.append(0, keys, values)
torch.save(cache.state_dict(), sys.argv[2])
"""


def test_state_goes_on_in_a_new_process(make: Make, chunk: Any, tmp_path: Path) -> None:
    cache = make(1, 3, storage="float8_e4m3", positions="renumber", max_position=12)
    for _ in range(7):
        cache.append(0, *chunk(2))
    chunks = [chunk(1) for _ in range(2)]
    torch.save((cache.state_dict(), chunks), tmp_path / "before.pt")
    for keys, values in chunks:
        cache.append(0, keys, values)
    paths = [str(tmp_path / name) for name in ("before.pt", "after.pt")]
    subprocess.run([sys.executable, "-c", CONTINUE, *paths], check=True)
    other = make(1, 3, storage="float8_e4m3", positions="renumber", max_position=12)
    other.load_state_dict(torch.load(paths[1], weights_only=True))
    assert content(other) == content(cache)


def test_a_state_is_a_copy_and_loading_can_be_rolled_back(make: Make, chunk: Any) -> None:
    cache = make(1, 3)
    cache.append(0, *chunk(5))
    state, seen = cache.state_dict(), content(cache)
    cache.append(0, *chunk(2))
    snapshot, later = cache.snapshot(), content(cache)
    cache.load_state_dict(state)
    assert content(cache) == seen != later
    cache.rollback(snapshot)
    assert content(cache) == later


def test_a_state_of_other_settings_is_refused_and_changes_nothing(make: Make, chunk: Any) -> None:
    cache = make(1, 3)
    cache.append(0, *chunk(5))
    seen = content(cache)
    with pytest.raises(ValueError, match="the state needs a cache with window_size=4"):
        cache.load_state_dict(make(1, 4).state_dict())
    with pytest.raises(ValueError, match="format must be 1, got None"):
        cache.load_state_dict({})
    damaged = make(1, 3).state_dict()
    damaged["layers"][1]["keys"] = damaged["layers"][1]["keys"][:, :2]
    with pytest.raises(ValueError, match="keys of the state must be"):
        cache.load_state_dict(damaged)
    assert content(cache) == seen

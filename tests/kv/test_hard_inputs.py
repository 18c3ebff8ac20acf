"""What callers really hand over: odd layouts, own reads, wrong types, windows below a chunk."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffcache.kv import RollingCache

Make = Callable[..., RollingCache]
STORAGE = ["float32", "bfloat16", "float8_e4m3", "int8"]


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_layouts_and_types_do_not_matter(make: Make, storage: str, dtype: torch.dtype) -> None:
    wide = torch.randn(2, 2, 6, 2, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    plain, odd = make(batch_size=2, storage=storage), make(batch_size=2, storage=storage)
    keys, values = wide[..., ::2]  # every second channel
    plain.append(0, keys.contiguous(), values.contiguous())
    odd.append(0, keys.transpose(1, 2).contiguous().transpose(1, 2), values)
    assert torch.equal(plain.read(0, 1).keys, odd.read(0, 1).keys)
    assert torch.equal(plain.read(0, 1).values, odd.read(0, 1).values)
    one = keys[:1, :3].expand(2, 3, 2, 4)  # no memory of its own for the second item
    plain.append(0, one.contiguous(), one.contiguous())
    odd.append(0, one, one)
    assert torch.equal(plain.read(0, 1).keys, odd.read(0, 1).keys)


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("page_tokens", [None, 1])
def test_what_a_read_gave_can_be_written_back_in_any_order(
    make: Make, chunk: Any, in_time: Any, storage: str, page_tokens: int | None
) -> None:
    cache = make(0, 3, storage=storage, dtype="bfloat16", page_tokens=page_tokens)
    cache.append(0, *chunk(3))
    view = cache.read(0, 1)
    before = view.keys.clone()
    cache.rewrite(0, [2, 0, 1], view.keys, view.values)
    after = cache.read(0, 1).keys.unflatten(1, (3, 3))
    torch.testing.assert_close(after[:, [2, 0, 1]], before.unflatten(1, (3, 3)), atol=0, rtol=1e-2)
    view = cache.read(0, 1)
    before = in_time(view)[1].clone()
    cache.append(0, view.keys, view.values)
    assert cache.frames(0) == [3, 4, 5]
    torch.testing.assert_close(in_time(cache.read(0, 1))[1], before, atol=0, rtol=1e-2)


@pytest.mark.parametrize("kind", [torch.int64, torch.bool, torch.complex64, torch.int8])
def test_what_is_no_float_is_refused(make: Make, chunk: Any, kind: torch.dtype) -> None:
    cache, (keys, values) = make(), chunk(1)
    for pair in (
        (torch.ones(1, 3, 2, 4).to(kind), values),
        (keys, torch.ones(1, 3, 2, 4).to(kind)),
    ):
        with pytest.raises(ValueError, match=f"must be a tensor of a floating type, got {kind}"):
            cache.append(0, *pair)
    with pytest.raises(ValueError, match="keys must be a tensor of a floating type, got list"):
        cache.append(0, keys.tolist(), values)
    assert cache.next_frame() == cache.bytes_written == 0


def test_numbers_that_are_none_are_refused_and_do_not_count_from_the_end(
    make: Make, chunk: Any
) -> None:
    cache = make(batch_size=2, page_tokens=1)
    cache.append(0, *chunk(2, 2))
    keys, values = chunk(1, 2)
    calls: list[Callable[[], Any]] = [
        lambda: cache.read(0.0, 1),  # type: ignore[arg-type]
        lambda: cache.read("0", 1),  # type: ignore[arg-type]
        lambda: cache.read(False, 1),
        lambda: cache.read(0, 1.5),  # type: ignore[arg-type]
        lambda: cache.read(0, True),
        lambda: cache.check_room(1.0),  # type: ignore[arg-type]
        lambda: cache.read(0, 1, items=1),  # type: ignore[arg-type]
        lambda: cache.read(0, 1, items=[True, False]),
        lambda: cache.read(0, 1, items=[0.0]),  # type: ignore[list-item]
        lambda: cache.read(0, 1, pages=[[0], [True]]),
        lambda: cache.read(0, 1, pages=torch.tensor([[0, 0], [0, 1]])),  # type: ignore[arg-type]
        lambda: cache.rewrite(0, [0.5], keys, values),  # type: ignore[list-item]
        lambda: cache.rewrite(0, [True], keys, values),
        lambda: cache.frames(-1),
        lambda: cache.frames(0, -1),
        lambda: cache.next_frame(2),
        lambda: cache.stale(0, 2),
        lambda: cache.on_host(-1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"must be (an? integer|one of|a sequence|different)"):
            call()


def test_tensors_of_integers_will_do_for_numbers(make: Make, chunk: Any) -> None:
    cache = make(batch_size=2, page_tokens=1)
    cache.append(torch.tensor(0), *chunk(2, 2), items=torch.tensor([1, 0]))  # type: ignore[arg-type]
    pages = torch.tensor([[0, 5], [1, 2]])
    view = cache.read(0, torch.tensor(1), pages=pages)  # type: ignore[arg-type]
    assert torch.equal(view.keys, cache.read(0, 1, pages=pages.tolist()).keys)


@pytest.mark.parametrize(
    ("sink", "window", "frames"),
    [(0, 0, []), (5, 1, [0, 1, 2, 3, 4, 20]), (2, 0, [0, 1]), (0, 1, [20]), (30, 0, [*range(21)])],
)
@pytest.mark.parametrize("mode", ["keep", "relative", "anchor", "renumber", "recompute"])
def test_windows_smaller_than_a_chunk_and_sinks_larger_than_a_window(
    make: Make, chunk: Any, mode: str, sink: int, window: int, frames: list[int]
) -> None:
    cache = make(sink, window, positions=mode, max_position=64, storage="int8")
    for _ in range(7):
        cache.append(0, *chunk(3))
        if cache.stale(0):
            cache.rewrite(0, cache.frames(0), *chunk(len(cache.frames(0))))
    assert cache.frames(0) == frames and cache.nbytes == cache.settings.nbytes()
    view = cache.read(0, 3)
    assert view.keys.shape == (1, 3 * len(frames), 2, 4)
    assert all(0 <= place < 64 for place in (*view.positions[0], view.chunk_positions[0] + 2))


def test_layers_may_be_written_in_any_order(make: Make, chunk: Any) -> None:
    one, two = make(num_layers=3, storage="int8"), make(num_layers=3, storage="int8")
    for step in range(9):
        chunks = [chunk(2) for _ in range(3)]
        for layer in range(3):
            one.append(layer, *chunks[layer])
        for layer in ((2, 0, 1), (1, 2, 0))[step % 2]:
            two.append(layer, *chunks[layer])
    for layer in range(3):
        a, b = one.read(layer, 1), two.read(layer, 1)
        assert torch.equal(a.keys, b.keys) and a.frames == b.frames and a.positions == b.positions


@pytest.mark.parametrize("storage", STORAGE)
def test_a_frame_of_nan_shows_and_leaves_no_trace_once_evicted(
    make: Make, chunk: Any, in_time: Any, storage: str
) -> None:
    cache = make(0, 2, batch_size=2, storage=storage, page_tokens=1, device_size=1)
    keys, values = chunk(1, 2)
    cache.append(0, torch.full_like(keys, float("nan")), values)
    cache.append(0, *chunk(1, 1), items=[1])
    assert cache.read(0, 1).keys[0, :3].isnan().all()
    _, keys, _ = in_time(cache.read(0, 1, items=[1]))
    assert keys[0].isnan().all() and not keys[1].isnan().any()
    cache.append(0, *chunk(2, 2))
    cache.clear([1])
    view, pages = cache.read(0, 1), cache.summaries(0, 1)
    assert not view.keys.isnan().any() and not pages.mean.isnan().any()


def test_reading_and_writing_across_inference_mode(make: Make, chunk: Any) -> None:
    cache = make(0, 2, page_tokens=1)
    with torch.inference_mode():
        cache.append(0, *chunk(2))
        snapshot = cache.snapshot()
        cache.append(0, *chunk(1))
    kept = cache.read(0, 1).keys.clone()
    with torch.inference_mode():
        cache.append(0, *chunk(2))
    cache.rollback(snapshot)
    cache.append(0, *chunk(1))
    assert cache.frames(0) == [1, 2] and not torch.equal(cache.read(0, 1).keys, kept)
    weight = torch.ones(4, requires_grad=True)
    (cache.read(0, 1).keys * weight).sum().backward()
    assert weight.grad is not None


def test_a_snapshot_outlives_its_cache_and_copies_are_no_snapshots(make: Make, chunk: Any) -> None:
    cache = make()
    cache.append(0, *chunk(4))
    snapshot = cache.snapshot()
    for twin in (copy.copy(cache.snapshot()), copy.deepcopy(snapshot)):
        with pytest.raises(ValueError, match="or a copy"):
            cache.rollback(twin)
    cache.append(0, *chunk(2))
    nbytes = snapshot.nbytes
    del cache
    gc.collect()
    assert snapshot.nbytes == nbytes > 0
    for stranger in (snapshot, None, 3):
        with pytest.raises(ValueError, match="this snapshot is of another cache"):
            make().rollback(stranger)  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["copy", "deepcopy", "pickle"])
def test_a_copy_is_a_cache_of_its_own(make: Make, chunk: Any, how: str) -> None:
    cache = make(1, 3, storage="int8", device_size=2, page_tokens=1)
    cache.append(0, *chunk(5))
    snapshot, seen = cache.snapshot(), cache.read(0, 1).keys.clone()
    twin = {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    }[how](cache)
    assert twin.frames(0) == cache.frames(0) and torch.equal(twin.read(0, 1).keys, seen)
    twin.append(0, *chunk(9))
    assert torch.equal(cache.read(0, 1).keys, seen) and snapshot.nbytes == 0
    with pytest.raises(ValueError, match="of another cache"):
        twin.rollback(snapshot)
    cache.append(0, *chunk(2))
    cache.rollback(snapshot)
    assert torch.equal(cache.read(0, 1).keys, seen)


def test_a_torch_device_and_bad_scopes(make: Make) -> None:
    assert make(device=torch.device("cpu")).settings.to_dict()["device"] == "cpu"
    with pytest.raises(ValueError, match="scopes must be a name or a list of them, got None"):
        make(scopes=None)

"""Within `decoded` a chunk decodes once, to the same bits, and its bytes are counted."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffcache.kv import RollingCache
from diffcache.kv.store import SlotStore

Make = Callable[..., RollingCache]
FORMS: list[dict[str, Any]] = [
    {"storage": "int8"},
    {"storage": "float8_e4m3", "dtype": "bfloat16"},
    {"storage": "bfloat16"},  # read as float32
    {"device_size": 2},  # the rest comes over from the host
    {"storage": "int8", "device_size": 2, "page_tokens": 1},
]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one at each read of the slots."""
    counted, read = list[int](), SlotStore.read

    def counting(self: SlotStore, *args: Any, **kwargs: Any) -> Any:
        counted.append(1)
        return read(self, *args, **kwargs)

    monkeypatch.setattr(SlotStore, "read", counting)
    return counted


@pytest.mark.parametrize("form", FORMS)
def test_reads_are_those_without_it(make: Make, chunk: Any, form: dict[str, Any]) -> None:
    rng = random.Random(1)
    plain, kept = (make(1, 4, batch_size=2, **form) for _ in range(2))
    moments: list[tuple[Any, Any]] = []
    for _ in range(12):
        with kept.decoded():
            for _ in range(30):
                layer, items = rng.randrange(2), rng.choice([None, [0], [1], [1, 0]])
                one, two = plain.read(layer, 1, items=items), kept.read(layer, 1, items=items)
                assert torch.equal(one.keys, two.keys) and torch.equal(one.values, two.values)
                assert (one.frames, one.positions) == (two.frames, two.positions)
                if rng.random() < 0.2:
                    do = rng.choice(["append", "rewrite", "snapshot", "rollback", "clear"])
                    keys, values = chunk(1, 2)
                    last = min(kept.next_frame(layer, item) for item in range(2)) - 1
                    if do == "append" or (do == "rewrite" and last < 0):
                        plain.append(layer, keys, values)
                        kept.append(layer, keys, values)
                    elif do == "rewrite":
                        plain.rewrite(layer, [last], keys, values)
                        kept.rewrite(layer, [last], keys, values)
                    elif do == "snapshot":
                        moments.append((plain.snapshot(), kept.snapshot()))
                    elif do == "rollback" and moments:
                        first, second = rng.choice(moments)
                        plain.rollback(first)
                        kept.rollback(second)
                    elif do == "clear":
                        plain.clear([0])
                        kept.clear([0])


def test_a_chunk_decodes_each_layer_once(make: Make, chunk: Any, loads: list[int]) -> None:
    cache = make(1, 3, storage="int8")
    for _ in range(6):
        loads.clear()
        with cache.decoded():
            for _ in range(4):
                for layer in range(2):
                    cache.read(layer, 1)
            for layer in range(2):
                cache.append(layer, *chunk(1))
        assert len(loads) == 2
    for _ in range(4):
        cache.read(0, 1)
    assert len(loads) == 6, "outside nothing is kept"


def test_bytes_are_counted_and_fall_as_layers_are_written(make: Make, chunk: Any) -> None:
    cache = make(1, 3, storage="int8")
    for layer in range(2):
        cache.append(layer, *chunk(4))
    slots, view = cache.settings.nbytes(), 2 * 4 * 3 * 2 * 4 * 4  # K and V of 4 frames in fp32
    with cache.decoded(), cache.decoded():
        assert cache.nbytes == slots
        for passes in range(3):
            for layer in range(2):
                cache.read(layer, 1)
                assert cache.nbytes == slots + view * (2 if passes else layer + 1)
        cache.append(0, *chunk(1))
        assert cache.nbytes == slots + view
        with cache.decoded():
            cache.read(1, 1)
        assert cache.nbytes == slots + view, "the inner block ended, not the outer one"
    assert cache.nbytes == slots


def test_what_is_read_in_place_is_not_kept(make: Make, chunk: Any) -> None:
    cache = make(1, 3)
    cache.append(0, *chunk(4))
    with cache.decoded():
        assert cache.read(0, 1).keys.data_ptr() == cache._stores[0].parts["keys"].data_ptr()
        assert cache.nbytes == cache.settings.nbytes()


def test_pages_are_not_kept_since_every_query_chooses_others(make: Make, chunk: Any) -> None:
    cache = make(1, 3, storage="int8", page_tokens=1)
    cache.append(0, *chunk(4))
    with cache.decoded():
        for page in range(12):
            cache.read(0, 1, pages=[[page]])
        assert cache.nbytes == cache.settings.nbytes()


def test_it_ends_with_an_error_and_serves_inference_mode(make: Make, chunk: Any) -> None:
    cache = make(1, 3, storage="int8")
    cache.append(0, *chunk(4))
    weight = torch.ones(4, requires_grad=True)
    with pytest.raises(ZeroDivisionError), cache.decoded():
        with torch.inference_mode():
            cache.read(0, 1)
        (cache.read(0, 1).keys * weight).sum().backward()  # would fail on an inference tensor
        _ = 1 / 0
    assert weight.grad is not None and cache.nbytes == cache.settings.nbytes()

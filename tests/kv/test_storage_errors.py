"""The report of what eight bits would do to the frames that a cache holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffcache.kv import RollingCache

Make = Callable[..., RollingCache]


@pytest.mark.parametrize("storage", ["bfloat16", "float32"])
def test_the_report_is_the_error_of_a_cache_that_stores_so(
    make: Make, chunk: Any, storage: str
) -> None:
    scopes = ("sink+window", "none", "recent_2")
    wide = {"num_layers": 3, "batch_size": 2, "scopes": scopes, "dtype": "float32"}
    caches = {name: make(1, 3, storage=name, **wide) for name in (storage, "int8", "float8_e4m3")}
    for _ in range(9):
        for layer in range(3):
            keys, values = (x.bfloat16().float() for x in chunk(2, 2))
            keys[..., 0] *= 2.0**layer
            for cache in caches.values():
                cache.append(layer, keys, values)
    rows = caches[storage].storage_errors()
    expected = [(layer, name) for layer in (0, 2) for name in ("float8_e4m3", "int8")]
    assert [(row.layer, row.storage) for row in rows] == expected
    for row in rows:
        held, eight = caches[storage].read(row.layer, 1), caches[row.storage].read(row.layer, 1)
        for part in ("keys", "values"):
            true = getattr(held, part).bfloat16().float()
            error = (getattr(eight, part) - true).norm() / true.norm()
            assert getattr(row, part) == pytest.approx(error.item(), rel=1e-4)
            assert 0.001 < getattr(row, part) < 0.05


def test_a_batch_whose_items_differ_in_length_is_one_row_per_layer(make: Make, chunk: Any) -> None:
    cache = make(1, 3, batch_size=3, storage="bfloat16")
    cache.append(0, *chunk(4, 1), items=[2])
    cache.append(0, *chunk(1, 1), items=[0])
    assert [(row.layer, row.storage) for row in cache.storage_errors()] == [
        (0, "float8_e4m3"),
        (0, "int8"),
    ]


def test_what_is_not_finite_shows_and_eight_bits_cannot_tell(make: Make, chunk: Any) -> None:
    assert make().storage_errors() == []
    cache = make()
    keys, values = chunk(1)
    keys[0, 0, 0, 0] = float("nan")
    cache.append(0, keys, values)
    assert all(
        torch.tensor(row.keys).isnan() and row.values < 0.05 for row in cache.storage_errors()
    )
    with pytest.raises(
        ValueError, match="this cache stores int8: make one with storage='bfloat16'"
    ):
        make(storage="int8").storage_errors()

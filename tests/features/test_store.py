"""The store: bytes counted exactly, the budget never exceeded, tensors ours alone."""

from __future__ import annotations

import random

import pytest
import torch

from diffcache.features.store import DTYPES, Store, TensorStore

SIZES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2, torch.float64: 8, torch.int64: 8}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float32"])
@pytest.mark.parametrize("max_bytes", [None, 0, 700, 5000])
def test_ledger_is_exact_under_random_use(seed, dtype, max_bytes):
    """After each put and drop the ledger equals the live tensors, within the budget."""
    rng = random.Random(seed)
    store = TensorStore(Store(max_bytes=max_bytes, dtype=dtype, device="cpu"))
    live, peak = [], 0
    for _ in range(60):
        if live and rng.random() < 0.4:
            store.drop(live.pop(rng.randrange(len(live))))
        else:
            made = rng.choice([torch.float32, torch.float16, torch.float64, torch.int64])
            tensor = torch.ones(rng.randrange(1, 90), dtype=made)
            before = store.bytes_held
            held = store.put(tensor, owned=rng.random() < 0.5)
            kept = DTYPES[dtype] if dtype and made.is_floating_point else made
            size = tensor.numel() * SIZES[kept]
            fits = max_bytes is None or before + size <= max_bytes
            assert (held is not None) == fits
            live += [] if held is None else [held]
        total = sum(tensor.untyped_storage().nbytes() for tensor in live)
        peak = max(peak, total)
        assert store.bytes_held == total
        assert max_bytes is None or total <= max_bytes
    assert store.bytes_peak == peak


def test_refusal_is_remembered():
    """A tensor that did not fit leaves a mark and costs nothing; one that just fits is taken."""
    store = TensorStore(Store(max_bytes=16))
    assert store.put(torch.ones(5)) is None
    assert store.refused and store.bytes_held == 0
    assert store.put(torch.ones(4)) is not None and store.bytes_held == 16


@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_nbytes_foretells_put(dtype):
    """What `nbytes` promises is what `put` takes."""
    store = TensorStore(Store(dtype=dtype))
    for tensor in (torch.ones(3, 5), torch.ones(7, dtype=torch.bfloat16), torch.arange(4)):
        expected, before = store.nbytes(tensor), store.bytes_held
        held = store.put(tensor)
        assert store.bytes_held - before == expected == held.numel() * held.element_size()


@pytest.mark.parametrize("owned", [False, True])
def test_views_are_compacted(owned):
    """A slice of a large tensor does not keep the large tensor alive."""
    large = torch.randn(64, 64)
    held = TensorStore(Store()).put(large[:, :2], owned)
    assert held.untyped_storage().nbytes() == 64 * 2 * 4
    assert torch.equal(held, large[:, :2])
    assert held.untyped_storage().data_ptr() != large.untyped_storage().data_ptr()


def test_held_tensor_is_ours_alone():
    """Writing into what was given does not change what is held, and no graph hangs on it."""
    given = torch.ones(4, requires_grad=True)
    held = TensorStore(Store()).put(given)
    with torch.no_grad():
        given.mul_(3)
    assert torch.equal(held, torch.ones(4)) and not held.requires_grad


def test_integers_keep_their_dtype():
    """Only floating tensors are stored in the asked dtype."""
    assert TensorStore(Store(dtype="bfloat16")).put(torch.arange(3)).dtype == torch.int64


def test_device_storage():
    """The history may lie on another device; meta stands in for it here, its bytes count."""
    store = TensorStore(Store(device="meta"))
    assert store.put(torch.ones(4)).device.type == "meta" and store.bytes_held == 16


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Store(max_bytes=-1), "max_bytes must be at least 0, got -1"),
        (lambda: Store(max_bytes=float("nan")), "max_bytes must be at least 0, got nan"),
        (
            lambda: Store(dtype="int8"),
            "dtype must be one of float32, bfloat16, float16 or None, got 'int8'",
        ),
    ],
)
def test_settings_are_checked(make, message):
    """The message names the setting, the bounds and what was given."""
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == message


def test_unknown_device_is_refused():
    """A device that torch does not know is refused as any other setting is."""
    with pytest.raises(ValueError, match="quantum"):
        Store(device="quantum")

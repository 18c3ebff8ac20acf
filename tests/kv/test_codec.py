"""Storage forms: how far off, how many bytes, no drift, and what is not finite stays visible."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffcache.kv.codec import STORAGE, decode, encode, storage_error, token_nbytes

# Largest error over the largest magnitude of the token's head: half a step of each type.
BOUND = {
    "float32": 0.0,
    "bfloat16": 2**-8,
    "float16": 2**-8,  # small heads lie among its subnormal numbers
    "float8_e4m3": 2**-4,
    "int8": 0.5 / 127,
}


def sample() -> torch.Tensor:
    """[2, 50, 3, 64] with heads whose sizes differ by ten orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    size = 10 ** torch.empty(2, 50, 3, 1).uniform_(-4, 4, generator=generator)
    return torch.randn(2, 50, 3, 64, generator=generator) * size


@pytest.mark.parametrize("storage", STORAGE)
def test_error_is_within_half_a_step(storage: str) -> None:
    x = sample()
    coded, scale = encode(x, storage)
    error = (decode(coded, scale, torch.float32) - x).abs().amax(-1) / x.abs().amax(-1)
    assert error.max() <= BOUND[storage] * 1.001
    assert storage == "float32" or error.max() > 0


@pytest.mark.parametrize("storage", STORAGE)
def test_bytes_per_token_are_those_of_the_tensors(storage: str) -> None:
    coded, scale = encode(sample(), storage)
    held = coded.nbytes + (0 if scale is None else scale.nbytes)
    assert held == 2 * 50 * 3 * token_nbytes(storage, 64)


@pytest.mark.parametrize("storage", ["int8", "float8_e4m3"])
def test_coding_what_was_read_gives_the_same_numbers(storage: str) -> None:
    first = encode(sample(), storage)
    again = first
    for _ in range(200):
        again = encode(decode(*again, torch.float32), storage)
    assert torch.equal(again[0].float(), first[0].float())
    assert first[1] is not None and again[1] is not None
    torch.testing.assert_close(again[1], first[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("storage", ["int8", "float8_e4m3"])
def test_zeros_stay_zeros_and_what_is_not_finite_reads_as_nan(storage: str) -> None:
    x = torch.ones(4, 8)
    x[0], x[1, 2], x[2, 3] = 0.0, float("inf"), float("nan")
    found = decode(*encode(x, storage), torch.float32)
    assert torch.equal(found[0], x[0]) and torch.equal(found[3], x[3])
    assert found[1:3].isnan().all()


def test_error_against_bfloat16() -> None:
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(1))
    errors = {storage: storage_error(x, storage) for storage in STORAGE}
    assert errors["bfloat16"] == errors["float32"] == 0
    # int8: a step of about 2.6 / 127, a uniform error of step / sqrt(12). e4m3: three bits.
    assert 0.004 < errors["int8"] < 0.008 and 0.015 < errors["float8_e4m3"] < 0.035
    assert storage_error(torch.zeros(2, 8), "int8") == 0


@pytest.mark.parametrize("storage", ["int8", "float8_e4m3"])
def test_200_chunks_in_the_cache_do_not_drift(make: Any, chunk: Any, storage: str) -> None:
    cache = make(1, 3, storage=storage)
    keys, values = chunk(1)
    cache.append(0, keys, values)
    first = cache.read(0, 1).keys
    for _ in range(200):
        cache.append(0, *chunk(1))
    sink = cache.read(0, 1).keys[:, :3]
    assert torch.equal(sink, first)
    expected = decode(*encode(keys, storage), torch.float32)
    assert torch.equal(sink, expected)

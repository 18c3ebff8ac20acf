"""Pages: their bound, their summaries, and reading some of them or all."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from diffcache.kv import RollingCache
from diffcache.kv.pages import page_bound

Make = Callable[..., RollingCache]
STORAGE = ["float32", "bfloat16", "float8_e4m3", "int8"]
SUMMARY_BYTES = 3 * 3 * 2 * 4 * 4  # kinds, pages of one token, heads, head_dim, fp32


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("page_tokens", [1, 3])
def test_all_pages_are_bit_equal_to_dense(
    make: Make, chunk: Any, storage: str, page_tokens: int
) -> None:
    cache = make(1, 3, storage=storage, page_tokens=page_tokens)
    for _ in range(7):
        cache.append(0, *chunk(2))
        dense, pages = cache.read(0, 2), cache.summaries(0, 2)
        view = cache.read(0, 2, pages=[list(range(len(pages.frames[0])))])
        assert torch.equal(view.keys, dense.keys) and torch.equal(view.values, dense.values)
        assert view.frames == pages.frames and view.positions == pages.positions
        each = 3 // page_tokens
        assert pages.frames[0] == tuple(f for f in dense.frames[0] for _ in range(each))


def test_chosen_pages_are_those_of_the_dense_read(make: Make, chunk: Any) -> None:
    random.seed(4)
    cache = make(1, 3, batch_size=2, page_tokens=1, positions="anchor")
    for step in range(8):
        cache.append(0, *chunk(2, 2))
        cache.append(0, *chunk(1), items=[step % 2])
        dense, size = cache.read(0, 2), [3 * len(cache.frames(0, item)) for item in range(2)]
        pages = [random.sample(range(n), random.randrange(n + 1)) for n in size]
        view = cache.read(0, 2, pages=pages)
        for item, row in enumerate(pages):
            assert torch.equal(view.keys[item, : len(row)], dense.keys[item, row])
            assert torch.equal(view.values[item, : len(row)], dense.values[item, row])
            assert not view.keys[item, len(row) :].any()
            assert view.frames[item][: len(row)] == tuple(dense.frames[item][p // 3] for p in row)
            places = tuple(dense.positions[item][p // 3] for p in row)
            assert view.positions[item][: len(row)] == places
            real = [True] * len(row) + [False] * (view.keys.shape[1] - len(row))
            assert real == ([True] * len(real) if view.mask is None else view.mask[item].tolist())


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_logit_exceeds_its_pages_bound(make: Make, chunk: Any, storage: str, dtype: str) -> None:
    generator = torch.Generator().manual_seed(5)
    cache = make(1, 3, batch_size=2, storage=storage, dtype=dtype, page_tokens=3)
    for step in range(30):
        keys, values = chunk(2, 2)
        cache.append(0, keys * 10.0 ** (step % 5 - 2), values)
        query = torch.randn(2, 5, 1, 4, 4, generator=generator)  # four query heads on two
        view, pages = cache.read(0, 2), cache.summaries(0, 2)
        bound = page_bound(query, pages.minimum, pages.maximum)
        tokens = view.keys.float().unflatten(1, (-1, 3)).repeat_interleave(2, dim=-2)
        logits = torch.einsum("bqnhd,bpthd->bqpth", query.squeeze(2)[:, :, None], tokens)
        assert (logits.amax(dim=3) <= bound).all()
        # Not vacuous: a page of one key has its logit for a bound, so some must come close.
        assert (logits.amax(dim=3) > 0.8 * bound).any()
        torch.testing.assert_close(
            pages.mean, view.keys.float().unflatten(1, (-1, 3)).mean(2), atol=1e-5, rtol=1e-5
        )


def test_a_page_of_one_token_is_bounded_by_its_own_logit(make: Make, chunk: Any) -> None:
    cache = make(1, 3, page_tokens=1)
    cache.append(0, *chunk(4))
    pages, query = cache.summaries(0, 1), torch.ones(1, 1, 1, 2, 4)
    logits = cache.read(0, 1).keys.sum(-1)[:, None]
    torch.testing.assert_close(page_bound(query, pages.minimum, pages.maximum), logits)


def test_rounding_does_not_carry_a_logit_over_the_bound() -> None:
    generator = torch.Generator().manual_seed(8)
    query, keys = torch.randn(2, 1, 200, 3, 128, generator=generator)  # pages of one key
    exact = (query.double() * keys.double()).sum(-1)[:, None]
    bound = page_bound(query[:, None], keys, keys)
    assert ((query * keys).sum(-1)[:, None].double() < exact).any(), "some sums round down"
    assert (bound.double() >= exact).all()
    torch.testing.assert_close(bound.double(), exact, atol=1e-2, rtol=0)


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_holds_from_the_smallest_numbers_to_what_is_not_finite(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def extreme(*shape: int) -> torch.Tensor:
        """Tokens of sizes from 1e-42, below the normal numbers, to 1e38; a tenth of them 0."""
        size = 10 ** torch.empty(*shape[:2], 1, 1, 1).uniform_(-42, 38, generator=generator)
        random = torch.randn(shape, generator=generator)
        return random * size * (torch.rand(shape, generator=generator) > 0.1)

    query, keys = extreme(1, 300, 1, 4, 8), extreme(1, 300, 5, 2, 8)  # pages of 5 keys
    keys = keys.clamp(-3e38, 3e38)
    bound = page_bound(query, keys.amin(2), keys.amax(2))
    wide = keys.double().repeat_interleave(2, dim=3)
    exact = torch.einsum("bqhd,bpthd->bqpth", query[:, :, 0].double(), wide).amax(3)
    assert (bound.double() >= exact).all()
    assert bound.isfinite().float().mean() > 0.2, "and says something about many pages"
    for odd in (float("nan"), float("inf"), -float("inf")):
        keys[0, :, 2, :, 3] = odd
        bound = page_bound(query, keys.amin(2), keys.amax(2))
        assert not bound.isnan().any() and (odd == odd or (bound == float("inf")).all())


def test_heads_that_do_not_share_are_refused() -> None:
    box = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="got 3 of the query, 2 of the keys"):
        page_bound(torch.zeros(1, 1, 1, 3, 4), box, box)


def test_summaries_are_counted_and_follow_rollback_and_state(make: Make, chunk: Any) -> None:
    cache = make(1, 3, page_tokens=1)
    plain = make(1, 3)
    assert cache.nbytes - plain.nbytes == 2 * 4 * SUMMARY_BYTES
    assert cache.nbytes == cache.settings.nbytes()
    cache.append(0, *chunk(5))
    before, snapshot, state = cache.summaries(0, 1), cache.snapshot(), cache.state_dict()
    before_mean = before.mean.clone()
    cache.append(0, *chunk(2))
    assert not torch.equal(cache.summaries(0, 1).mean, before_mean)
    cache.rollback(snapshot)
    assert torch.equal(cache.summaries(0, 1).mean, before_mean)
    other = make(1, 3, page_tokens=1)
    other.load_state_dict(state)
    assert torch.equal(other.summaries(0, 1).mean, before_mean)


def test_bad_pages_are_refused(make: Make, chunk: Any) -> None:
    with pytest.raises(ValueError, match="page_tokens must divide 3, got 2"):
        make(page_tokens=2)
    with pytest.raises(ValueError, match="make it with page_tokens"):
        make().read(0, 1, pages=[[]])
    cache = make(page_tokens=1)
    cache.append(0, *chunk(1))
    for pages, message in ([[0, 0]], "different ones"), ([[3]], "first 3"), ([[], []], "a row for"):
        with pytest.raises(ValueError, match=message):
            cache.read(0, 1, pages=pages)

"""Caches that live on: turns, rollback, beams, rows that leave, padding, chunks."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_llms
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

import diffcache

NAMES = diffcache.kv.kv_policies()
every_policy = pytest.mark.parametrize("name", NAMES)


def wrapped(name: str, **settings: Any) -> Any:
    return diffcache.wrap(tiny_llms.llama(), name, **settings)


@torch.no_grad()
def ask(model: Any, tokens: Tensor, cache: Any = None, **more: Any) -> Any:
    return model(tokens, cache=cache, **more)


def padded(row: Tensor, pads: int) -> tuple[Tensor, Tensor]:
    """Tokens [1, pads + n] with padding on the left, and their mask."""
    mask = torch.ones(1, pads + row.shape[1], dtype=torch.long)
    mask[:, :pads] = 0
    return torch.cat([torch.zeros(1, pads, dtype=torch.long), row], 1), mask


def real_tokens(cache: Any, row: int, pads: int) -> list[Tensor]:
    return [layer[row, :, pads:] for layer in tiny_llms.kept_columns(cache)]


@every_policy
def test_a_second_turn_through_generate(name: str) -> None:
    """transformers #31381, #38727: a second call with the same compressed cache broke."""
    model = wrapped(name)
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(tiny_llms.ids(1, 120), **settings)
    assert first.cache.get_seq_length() == 123  # the last token was not fed back
    turn = torch.cat([first.sequences, tiny_llms.ids(1, 60, 2)], 1)
    second = model.generate(turn, cache=first.cache, **settings)
    assert second.cache is first.cache and second.cache.get_seq_length() == turn.shape[1] + 3


def test_the_second_turn_is_compressed_too() -> None:
    """kvpress kept 32 + 40 of 72."""
    model = wrapped("keydiff", keep=0.5)
    cache = ask(model, tiny_llms.ids(1, 64)).cache
    ask(model, tiny_llms.ids(1, 40, 2), cache)
    assert all(int(layer.sum()) == 2 * 52 for layer in tiny_llms.kept_columns(cache))


@every_policy
def test_two_questions_on_one_context_equal_two_fresh_runs(name: str) -> None:
    """kvpress #27, #221: a second question on one context, and state kept between samples."""
    model = wrapped(name)
    context, questions = tiny_llms.ids(1, 160), [tiny_llms.ids(1, 6, seed) for seed in (2, 3)]
    shared = ask(model, context).cache
    for question in questions:
        fresh = ask(model, question, ask(model, context).cache).logits
        assert torch.equal(ask(model, question, shared.fork()).logits, fresh)
    assert shared.get_seq_length() == 160


@every_policy
def test_rolling_back_an_answer_leaves_the_context(name: str) -> None:
    model = wrapped(name, trigger={"kind": "after_prefill", "slack": 20})
    cache = ask(model, tiny_llms.ids(1, 160)).cache
    before = tiny_llms.kept_columns(cache)
    twin = cache.fork()
    ask(model, tiny_llms.ids(1, 9, 2), cache)
    cache.rollback(9)
    after = tiny_llms.kept_columns(cache)
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    question = tiny_llms.ids(1, 5, 4)
    assert torch.equal(ask(model, question, cache).logits, ask(model, question, twin).logits)


@every_policy
def test_crop_takes_kept_tokens_by_their_column(name: str) -> None:
    """PR 45510: crop left the quantised part unchanged."""
    model = wrapped(name)
    cache = ask(model, tiny_llms.ids(1, 160)).cache
    kept = tiny_llms.kept_columns(cache)
    cache.crop(-40)
    assert cache.get_seq_length() == cache.timeline.columns == 120
    for before, after in zip(kept, tiny_llms.kept_columns(cache), strict=True):
        assert torch.equal(before[..., :120], after)
    ask(model, tiny_llms.ids(1, 3, 2), cache)
    assert cache.get_seq_length() == 123


@every_policy
def test_reordered_rows_answer_as_the_rows_they_came_from(name: str) -> None:
    model = wrapped(name)
    cache = ask(model, tiny_llms.ids(3, 160)).cache
    twin, order, token = cache.fork(), torch.tensor([2, 0, 0]), tiny_llms.ids(3, 1, 2)
    straight = ask(model, token, twin).logits
    cache.reorder_cache(order)
    moved = ask(model, token[order], cache).logits
    assert torch.allclose(moved, straight[order], atol=1e-6)


@every_policy
def test_rows_that_leave_do_not_disturb_the_others(name: str) -> None:
    """omlx #2172: live keys were overwritten after a row had left."""
    model = wrapped(name)
    short, mask = padded(tiny_llms.ids(1, 130, 5), 30)
    prompt = torch.cat([tiny_llms.ids(1, 160), short])
    mask = torch.cat([torch.ones(1, 160, dtype=torch.long), mask])
    cache = ask(model, prompt, attention_mask=mask).cache
    twin, token = cache.fork(), tiny_llms.ids(2, 1, 2)
    longer = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    both = ask(model, token, twin, attention_mask=longer).logits
    cache.batch_select_indices(torch.tensor([1]))
    alone = ask(model, token[1:], cache, attention_mask=longer[1:]).logits
    assert torch.allclose(alone, both[1:], atol=1e-6)


@every_policy
def test_padding_is_never_kept_and_never_counted(name: str) -> None:
    """kvpress #25: a padded row kept pads, and half of the keys that it keeps alone."""
    model, row = wrapped(name), tiny_llms.ids(1, 130, 5)
    tokens, mask = padded(row, 30)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = ask(model, tokens, attention_mask=mask, position_ids=positions).cache
    alone = ask(model, row).cache
    pairs = zip(real_tokens(cache, 0, 30), real_tokens(alone, 0, 0), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    if not cache.kv_policy.exact:
        assert not any(layer[..., :30].any() for layer in tiny_llms.kept_columns(cache))


@every_policy
def test_beam_search_runs_and_ends_where_greedy_would_for_one_beam(name: str) -> None:
    model, prompt = wrapped(name), tiny_llms.ids(2, 140)
    settings = {"max_new_tokens": 5, "do_sample": False}
    beams = model.generate(prompt, num_beams=3, **settings)
    assert beams.shape == (2, 145)
    assert torch.equal(model.generate(prompt, **settings), model.generate(prompt, **settings))


@every_policy
def test_chunked_prefill_ends_within_the_budget(name: str) -> None:
    """kvpress compressed the first chunk only."""
    model = wrapped(name)
    settings = {"max_new_tokens": 1, "do_sample": False, "return_dict_in_generate": True}
    chunked = model.generate(tiny_llms.ids(1, 160), prefill_chunk_size=40, **settings).cache
    whole = model.generate(tiny_llms.ids(1, 160), **settings).cache
    kept, all_ = ([int(x.sum()) for x in tiny_llms.kept_columns(c)] for c in (chunked, whole))
    assert sum(kept) <= sum(all_) + len(kept)  # layers may share out differently


@every_policy
def test_embeddings_in_place_of_tokens(name: str) -> None:
    """KVzip raised when the model got inputs_embeds."""
    model, prompt = wrapped(name), tiny_llms.ids(1, 160)
    embeds = model.get_input_embeddings()(prompt).detach()
    by_ids = ask(model, prompt).cache
    with torch.no_grad():
        by_embeds = model(inputs_embeds=embeds).cache
    pairs = zip(tiny_llms.kept_columns(by_ids), tiny_llms.kept_columns(by_embeds), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    model.generate(inputs_embeds=embeds, max_new_tokens=2, do_sample=False)


def test_compression_by_hand() -> None:
    for scorer in ("key_difference", "window_attention", "accumulated_attention"):
        model = wrapped("keydiff", keep=0.5, scorer=scorer, trigger={"kind": "manual"})
        cache = ask(model, tiny_llms.ids(1, 160)).cache
        assert all(bool(layer.all()) for layer in tiny_llms.kept_columns(cache))
        cache.compress()
        assert all(int(layer.sum()) == 160 for layer in tiny_llms.kept_columns(cache))
    model = wrapped("expectedattention", trigger={"kind": "manual"})
    with pytest.raises(diffcache.DiffcacheError, match="queries of the pass at hand"):
        ask(model, tiny_llms.ids(1, 160)).cache.compress()


def test_a_reset_cache_begins_anew() -> None:
    model = wrapped("keydiff")
    cache = DynamicCache(config=model.config)
    first = ask(model, tiny_llms.ids(1, 60), cache).logits
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(ask(model, tiny_llms.ids(1, 60), cache).logits, first)

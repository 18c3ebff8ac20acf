"""With nothing evicted a wrapped language model is the same model, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_llms
import torch
from transformers.cache_utils import DynamicCache

import diffcache

MODELS = {"llama": tiny_llms.llama, "qwen3": tiny_llms.qwen3}
pytestmark = [
    pytest.mark.parametrize("attn", ["sdpa", "eager"]),
    pytest.mark.parametrize("make", MODELS.values(), ids=MODELS),
]


def unquantised() -> list[str]:
    names = diffcache.kv.kv_policies()
    full = {name: diffcache.kv.get_kv_policy(name, keep=1.0) for name in names}
    return [name for name, policy in full.items() if policy.exact]


def run(model: Any, *turns: torch.Tensor, **first: Any) -> list[torch.Tensor]:
    """Logits of each turn, on one cache that the caller made."""
    cache, logits = DynamicCache(config=model.config), []
    for turn in turns:
        with torch.no_grad():
            logits.append(model(turn, cache=cache, **first).logits)
        first = {}
    return logits


@pytest.mark.parametrize("name", unquantised())
def test_keeping_everything_gives_the_same_bits(make: Any, attn: str, name: str) -> None:
    turns = tiny_llms.ids(1, 40), tiny_llms.ids(1, 7, 2), tiny_llms.ids(1, 1, 3)
    plain = run(make(attn), *turns)
    wrapped = run(diffcache.wrap(make(attn), name, keep=1.0), *turns)
    assert all(torch.equal(*pair) for pair in zip(plain, wrapped, strict=True))


def test_generate_gives_the_same_tokens_with_padding_and_beams(make: Any, attn: str) -> None:
    prompt = tiny_llms.ids(2, 20)
    mask = torch.ones_like(prompt)
    prompt[0, :6], mask[0, :6] = 0, 0
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "num_beams": 2}
    plain = make(attn).generate(prompt, **settings)
    wrapped = diffcache.wrap(make(attn), "keydiff", keep=1.0).generate(prompt, **settings)
    assert torch.equal(plain, wrapped)


def test_a_prompt_shorter_than_the_budget_is_untouched(make: Any, attn: str) -> None:
    turns = tiny_llms.ids(1, 30), tiny_llms.ids(1, 5, 2)
    plain = run(make(attn), *turns)
    wrapped = run(diffcache.wrap(make(attn), "keydiff", tokens=64), *turns)
    assert all(torch.equal(*pair) for pair in zip(plain, wrapped, strict=True))


def test_a_prompt_of_window_and_sinks_is_untouched_at_any_ratio(make: Any, attn: str) -> None:
    """kvpress #134: SnapKV on a tiny context gave repeated garbage."""
    turns = tiny_llms.ids(1, 68), tiny_llms.ids(1, 1, 2)
    plain = run(make(attn), *turns)
    wrapped = run(diffcache.wrap(make(attn), "snapkv", keep=0.1), *turns)
    assert all(torch.equal(*pair) for pair in zip(plain, wrapped, strict=True))

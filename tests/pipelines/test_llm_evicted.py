"""An evicted cache is a full cache with the same tokens masked, and its bytes are gone."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_llms
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import diffcache

LENGTH = 160


def dropping() -> list[str]:
    """Policies whose kept tokens stay as they are."""
    found = []
    for name in diffcache.kv.kv_policies():
        policy = diffcache.kv.get_kv_policy(name)
        plain = policy.storage.codec(torch.float32).name == "full"
        if plain and policy.compressor.kind == "drop" and not policy.exact:
            found.append(name)
    return found


@torch.no_grad()
def compressed(name: str, attn: str = "sdpa", make: Any = tiny_llms.llama, **settings: Any) -> Any:
    """A wrapped model, its prompt and its compressed cache."""
    model = diffcache.wrap(make(attn), name, **settings)
    prompt = tiny_llms.ids(1, LENGTH)
    return model, prompt, model(prompt).cache


@pytest.mark.parametrize("new", [1, 7])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("name", dropping())
def test_evicted_equals_masked(name: str, attn: str, new: int) -> None:
    model, prompt, cache = compressed(name, attn, keep=0.5)
    later, kept = tiny_llms.ids(1, new, 2), tiny_llms.kept_columns(cache)
    assert all(layer.sum() < layer.numel() for layer in kept)
    with torch.no_grad():
        logits = model(later, cache=cache).logits
    reference = tiny_llms.masked_full(tiny_llms.llama("eager"), prompt, later, kept)
    assert tiny_llms.error(logits, reference) < 1e-6
    everything = [torch.ones_like(layer) for layer in kept]
    unmasked = tiny_llms.masked_full(tiny_llms.llama("eager"), prompt, later, everything)
    assert tiny_llms.error(unmasked, reference) > 1e-3  # what was evicted mattered


@pytest.mark.parametrize("name", dropping())
def test_evicted_equals_masked_with_normed_queries_and_wide_heads(name: str) -> None:
    """kvpress #76, #81, #136, #213: norms of queries and keys, heads that do not add up."""
    model, prompt, cache = compressed(name, make=tiny_llms.qwen3, keep=0.5)
    later, kept = tiny_llms.ids(1, 5, 2), tiny_llms.kept_columns(cache)
    with torch.no_grad():
        logits = model(later, cache=cache).logits
    reference = tiny_llms.masked_full(tiny_llms.qwen3("eager"), prompt, later, kept)
    assert tiny_llms.error(logits, reference) < 1e-6


@pytest.mark.parametrize("name", dropping())
def test_the_prompt_itself_is_attended_to_in_full(name: str) -> None:
    model = diffcache.wrap(tiny_llms.llama(), name, keep=0.5)
    prompt = tiny_llms.ids(1, LENGTH)
    with torch.no_grad():
        assert torch.equal(model(prompt).logits, tiny_llms.llama()(prompt).logits)


@pytest.mark.parametrize("name", diffcache.kv.kv_policies())
def test_the_next_position_counts_every_token_ever_seen(name: str) -> None:
    """kvpress #16: the length became the compressed one."""
    settings = {} if diffcache.kv.get_kv_policy(name).exact else {"keep": 0.5}
    _, _, cache = compressed(name, **settings)
    assert cache.get_seq_length() == LENGTH


@pytest.mark.parametrize("name", diffcache.kv.kv_policies())
def test_the_ledger_is_the_bytes_of_the_live_tensors(name: str) -> None:
    model, _, cache = compressed(name)
    for turn in (tiny_llms.ids(1, 9, 2), tiny_llms.ids(1, 1, 3)):
        tables = diffcache.kv.held_bytes(cache.timeline.tensors().values())
        assert cache.nbytes == tables + sum(core.nbytes_promised() for core in cache.cores)
        assert diffcache.report(model).summary["bytes_held"] == cache.nbytes
        with torch.no_grad():
            model(turn, cache=cache)


@pytest.mark.parametrize("name", dropping())
def test_keeping_a_quarter_frees_three_quarters(name: str) -> None:
    """kvpress #7, #25, #38: methods per head and per channel freed nothing.

    Heads of 64 as real models have, so that what is kept of each token beside its key and value
    (its column) weighs what it weighs there.
    """
    model = diffcache.wrap(tiny_llms.llama(head_dim=64), name, keep=0.25)
    prompt = tiny_llms.ids(1, 400)
    with torch.no_grad():
        cache = model(prompt).cache
    full = diffcache.kv.kv_bytes(model.config, 400)
    assert 1 - cache.nbytes / full >= 0.74


@pytest.mark.parametrize("length", [32, 64, 160, 500])
@pytest.mark.parametrize("name", dropping())
def test_a_budget_of_tokens_holds_for_any_prompt(name: str, length: int) -> None:
    """kvpress #102: an absolute size, not a ratio."""
    model = diffcache.wrap(tiny_llms.llama(), name, tokens=80)
    with torch.no_grad():
        cache = model(tiny_llms.ids(1, length)).cache
    kept = [int(layer.sum()) for layer in tiny_llms.kept_columns(cache)]
    heads = model.config.num_key_value_heads
    assert sum(kept) <= heads * len(kept) * min(80, length)
    assert sum(kept) >= heads * len(kept) * min(80, length) - heads * len(kept)


class Largest(TorchDispatchMode):
    """The largest square that any tensor's last two axes could hold."""

    def __init__(self) -> None:
        super().__init__()
        self.side = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim >= 2:
                self.side = max(self.side, min(tensor.shape[-2:]))
        return result


@pytest.mark.parametrize("name", diffcache.kv.kv_policies())
def test_no_square_of_the_prompt_is_ever_made(name: str) -> None:
    """VisionZip #29, DyCoke #11, vla-cache #9: attention maps cost what was to be saved."""
    model = diffcache.wrap(tiny_llms.llama(), name)
    with Largest() as largest, torch.no_grad():
        model(tiny_llms.ids(1, 300), logits_to_keep=1)
    assert largest.side < 300

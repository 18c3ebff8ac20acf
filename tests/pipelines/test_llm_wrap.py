"""Wrapping a language model: undone exactly, refused where it cannot work, and reported."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_llms
import torch
from transformers import AutoModelForCausalLM, MistralConfig
from transformers.cache_utils import DynamicCache, StaticCache

import diffcache
from diffcache.pipelines.llm_cache import CompressedCache


def hooks(model: Any) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_unwrap_leaves_nothing(attn: str) -> None:
    model, twin = tiny_llms.llama(attn), tiny_llms.llama(attn)
    names = set(model.__dict__)
    assert diffcache.wrap(model, "keydiff") is model
    prompt = tiny_llms.ids(1, 50)
    model.generate(prompt, max_new_tokens=2, do_sample=False)
    assert diffcache.unwrap(model) is model
    assert set(model.__dict__) == names and hooks(model) == hooks(twin) == 0
    assert model.config._attn_implementation == attn
    assert model.config.to_dict() == twin.config.to_dict()
    with torch.no_grad():
        found, wanted = model(prompt), twin(prompt)
    assert torch.equal(found.logits, wanted.logits) and type(found.cache) is DynamicCache


def test_unwrapping_twice_or_what_was_never_wrapped_is_harmless() -> None:
    model = tiny_llms.llama()
    assert diffcache.unwrap(diffcache.unwrap(model)) is model


def test_models_that_share_a_config_do_not_disturb_each_other() -> None:
    first = tiny_llms.llama()
    second = type(first)(first.config).eval()
    plain = tiny_llms.llama()
    prompt = tiny_llms.ids(1, 60)
    diffcache.wrap(first, "keydiff")
    with torch.no_grad():
        assert type(second(prompt).cache) is DynamicCache
    diffcache.wrap(second, "keydiff")
    diffcache.unwrap(first)
    with torch.no_grad():
        assert torch.equal(first(prompt).logits, plain(prompt).logits)
        assert isinstance(second(prompt).cache, CompressedCache)
    diffcache.unwrap(second)
    assert first.config._attn_implementation == "sdpa"


def test_wrapping_again_replaces_the_policy() -> None:
    model = diffcache.wrap(diffcache.wrap(tiny_llms.llama(), "keydiff"), "streamingllm")
    with torch.no_grad():
        model(tiny_llms.ids(1, 60))
    assert diffcache.report(model).summary["policy"] == "streamingllm"
    assert hooks(model) == 2
    diffcache.unwrap(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_copy_of_a_wrapped_model_is_not_wrapped() -> None:
    model = diffcache.wrap(tiny_llms.llama(), "keydiff")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        assert type(twin(tiny_llms.ids(1, 60)).cache) is DynamicCache
    with pytest.raises(ValueError, match="not wrapped"):
        diffcache.report(twin)


def test_a_cache_that_the_caller_made_is_the_one_that_is_filled() -> None:
    model = diffcache.wrap(tiny_llms.llama(), "keydiff", keep=0.5)
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        with torch.no_grad():
            assert model(tiny_llms.ids(1, 60), cache=cache).cache is cache
        assert isinstance(cache, CompressedCache) and cache.get_seq_length() == 60
        assert all(int(layer.sum()) == 60 for layer in tiny_llms.kept_columns(cache))


def test_what_cannot_be_compressed_says_so() -> None:
    model = diffcache.wrap(tiny_llms.llama(), "keydiff")
    prompt = tiny_llms.ids(1, 40)
    with pytest.raises(diffcache.DiffcacheError, match="StaticCache cannot be compressed"):
        model(prompt, cache=StaticCache(config=model.config, max_cache_len=64))
    with diffcache.disabled(model), torch.no_grad():
        filled = model(prompt).cache
    assert type(filled) is DynamicCache
    with pytest.raises(diffcache.DiffcacheError, match="filled without the KV policy"):
        model(prompt, cache=filled)
    model.set_attn_implementation("eager")
    with pytest.raises(diffcache.DiffcacheError, match="changed after wrap"):
        model(prompt)


def test_a_model_whose_layers_are_all_bounded_is_refused() -> None:
    config = MistralConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
    )
    with pytest.raises(ValueError, match="no full-attention layer to compress"):
        diffcache.wrap(AutoModelForCausalLM.from_config(config), "keydiff")


def test_a_policy_for_features_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"takes a KV policy.*kv_policies"):
        diffcache.wrap(tiny_llms.llama(), diffcache.get_policy("hold"))
    with pytest.raises(ValueError, match="unknown KV policy 'easycache'"):
        diffcache.wrap(tiny_llms.llama(), "easycache")


def test_a_cache_of_another_model_is_refused() -> None:
    model, other = diffcache.wrap(tiny_llms.llama(), "keydiff"), tiny_llms.llama()
    with torch.no_grad():
        cache = model(tiny_llms.ids(1, 40)).cache
    with pytest.raises(diffcache.DiffcacheError, match="outside a wrapped model's forward"):
        other(tiny_llms.ids(1, 3), cache=cache)


def test_the_report_says_what_was_kept(tmp_path: Path) -> None:
    model = diffcache.wrap(tiny_llms.llama(), "keydiff", keep=0.25)
    assert "nothing ran yet" in str(diffcache.report(model))
    model.generate(tiny_llms.ids(1, 100), max_new_tokens=3, do_sample=False)
    report = diffcache.report(model)
    assert report.summary["seen"] == 102 and len(report.rows) == 3
    assert all(row["before"] == 200 and row["after"] == 50 for row in report.rows)
    assert json.loads(report.to_json())["summary"]["policy"] == "keydiff"
    report.to_html(tmp_path / "report.html")
    assert "key_difference" in (tmp_path / "report.html").read_text()
    diffcache.reset(model)
    assert diffcache.report(model).rows == []

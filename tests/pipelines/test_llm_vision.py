"""Vision models: images as embeddings, three axes of positions, roles of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_families
import tiny_llms
import torch

import diffcache

FAMILIES = ["qwen2_5_vl", "llava", "smolvlm"]
every_family = pytest.mark.parametrize("family", FAMILIES)
SETTINGS = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}


@torch.no_grad()
def compressed(family: str, name: str, **settings: Any) -> tuple[Any, dict[str, Any], Any]:
    model = diffcache.wrap(tiny_families.vision_family(family), name, **settings)
    inputs = tiny_families.vision_inputs(family)
    return model, inputs, model.model(**inputs).cache


@every_family
def test_keeping_everything_gives_the_same_tokens_and_bits(family: str) -> None:
    plain = tiny_families.vision_family(family)
    wrapped = diffcache.wrap(tiny_families.vision_family(family), "exact")
    inputs = tiny_families.vision_inputs(family)
    with torch.no_grad():
        assert torch.equal(plain(**inputs).logits, wrapped(**inputs).logits)
    made = [model.generate(**inputs, **SETTINGS).sequences for model in (plain, wrapped)]
    assert torch.equal(*made)


@every_family
def test_only_the_language_model_changes_its_attention(family: str) -> None:
    model = diffcache.wrap(tiny_families.vision_family(family), "keydiff")
    assert model.config.text_config._attn_implementation == "diffcache_sdpa"
    assert model.config.vision_config._attn_implementation == "sdpa"
    diffcache.unwrap(model)
    assert model.config.text_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["keydiff", "snapkv", "expectedattention", "h2o", "fast"])
@every_family
def test_policies_run_and_keep_half(family: str, name: str) -> None:
    """SnapKV, TOVA and expected attention raised on three axes."""
    small = {"window": 8, "recent": 8} if name == "snapkv" else {}
    model = diffcache.wrap(tiny_families.vision_family(family), name, keep=0.5, **small)
    inputs = tiny_families.vision_inputs(family)
    cache = model.generate(**inputs, **SETTINGS).cache
    seen = inputs["input_ids"].shape[1] + 3
    kept = [int(layer.sum()) for layer in tiny_llms.kept_columns(cache)]
    assert cache.get_seq_length() == seen
    assert sum(kept) <= 2 * len(kept) * (seen // 2 + 3)


def test_evicting_an_image_leaves_later_positions_as_they_were() -> None:
    """llama.cpp #13865: text behind an evicted image moved on one axis and not on the others."""
    model, inputs, _ = compressed("qwen2_5_vl", "keydiff")
    ids = inputs["input_ids"]
    diffcache.wrap(
        model,
        "exact",
        keep=0.7,
        scorer={"kind": "gated", "scorer": "position", "roles": [2]},
    )
    with diffcache.kv_roles(model, (ids == tiny_families.IMAGE).int() * 2):
        made = model.generate(**inputs, **SETTINGS).cache
    full = diffcache.wrap(tiny_families.vision_family("qwen2_5_vl"), "exact")
    whole = full.generate(**inputs, **SETTINGS).cache
    image = (ids == tiny_families.IMAGE)[0].nonzero().flatten()
    for layer in tiny_llms.kept_columns(made):
        assert not layer[..., image].any()
    assert torch.equal(made.timeline.positions, whole.timeline.positions)
    last = made.timeline.positions[:, 0, -1]
    assert bool((last < made.get_seq_length() - 1).all())  # the image spans fewer than its tokens
    assert bool((last == last[0]).all())


def test_rolling_back_goes_by_tokens_and_positions_follow() -> None:
    """buun-llama-cpp PR 58: a count of tokens was taken for a position."""
    model, _, cache = compressed("qwen2_5_vl", "keydiff", keep=0.5, slack=20)
    answer = tiny_llms.ids(1, 5, 2).clamp(max=79)
    twin = cache.fork()
    with torch.no_grad():
        model(answer, cache=cache)
        positions = cache.timeline.positions[..., -5:].clone()
        cache.rollback(5)
        again = model(answer, cache=cache)
        fresh = model(answer, cache=twin)
    assert torch.equal(again.logits, fresh.logits)
    assert torch.equal(cache.timeline.positions[..., -5:], positions)


def test_all_text_can_be_protected() -> None:
    inputs = tiny_families.vision_inputs("llava")
    model = diffcache.wrap(tiny_families.vision_family("llava"), "streamingllm", roles=(1,))
    text = inputs["input_ids"] != tiny_families.IMAGE
    with diffcache.kv_roles(model, text.int()), torch.no_grad():
        cache = model.model(**inputs).cache
    for layer in tiny_llms.kept_columns(cache):
        assert bool(layer[..., text[0]].all()) and not bool(layer.all())


def test_roles_that_make_no_sense_are_refused() -> None:
    model = diffcache.wrap(tiny_families.vision_family("llava"), "streamingllm")
    for wrong in (torch.zeros(1, 5), torch.full((1, 5), -1), torch.zeros(5, dtype=torch.int64)):
        with (
            pytest.raises(ValueError, match="roles must be whole numbers"),
            diffcache.kv_roles(model, wrong),
        ):
            pass

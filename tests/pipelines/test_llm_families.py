"""Families of language models: windows, latents, linear layers, partial rotations, experts."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_families
import tiny_llms
import torch
from transformers.cache_utils import DynamicCache

import diffcache
from diffcache.pipelines.llm_cache import CompressedCache, KVLayer

FAMILIES = list(tiny_families.FAMILIES)
LENGTH = 80
PER_HEAD = {"deepseek"}  # one latent for all heads: budgets per head are refused
every_family = pytest.mark.parametrize("family", FAMILIES)


@torch.no_grad()
def compressed(family: str, name: str, **settings: Any) -> tuple[Any, torch.Tensor, Any]:
    model = diffcache.wrap(tiny_families.family(family), name, **settings)
    prompt = tiny_llms.ids(1, LENGTH)
    return model, prompt, model(prompt).cache


@every_family
def test_keeping_everything_gives_the_same_bits(family: str) -> None:
    plain = tiny_families.family(family)
    wrapped = diffcache.wrap(tiny_families.family(family), "exact")
    pairs = [(model, DynamicCache(config=model.config)) for model in (plain, wrapped)]
    for turn in (tiny_llms.ids(1, 40), tiny_llms.ids(1, 6, 2), tiny_llms.ids(1, 1, 3)):
        with torch.no_grad():
            logits = [model(turn, cache=cache).logits for model, cache in pairs]
        assert torch.equal(*logits)


@pytest.mark.parametrize("name", ["keydiff", "h2o", "fast"])
@every_family
def test_evicted_equals_masked(family: str, name: str) -> None:
    if name == "fast" and family in PER_HEAD:
        pytest.skip("refused: see below")
    model, prompt, cache = compressed(family, name, keep=0.5)
    kept, later = tiny_llms.kept_columns(cache), tiny_llms.ids(1, 5, 2)
    assert all(layer.sum() < layer.numel() for layer in kept)
    with torch.no_grad():
        logits = model(later, cache=cache).logits
    numbers = [n for n, layer in enumerate(cache.layers) if isinstance(layer, KVLayer)]
    plain = tiny_families.family(family)
    reference = tiny_llms.masked_full(plain, prompt, later, kept, numbers)
    # Experts that tie and recurrent states in fp32 leave a little more than attention does.
    assert tiny_llms.error(logits, reference) < 1e-5


@every_family
def test_layers_that_are_bounded_already_are_left_alone_and_named(family: str) -> None:
    model, _, cache = compressed(family, "keydiff")
    alone = [layer for layer in cache.layers if not isinstance(layer, KVLayer)]
    notes = " ".join(diffcache.report(model).summary["notes"])
    assert diffcache.report(model).summary["left_alone"] == len(alone)
    assert all(type(layer).__name__ in notes for layer in alone)
    assert ("left as they are" in notes) == bool(alone)


@every_family
def test_generate_goes_on_and_positions_stay_true(family: str) -> None:
    model = diffcache.wrap(tiny_families.family(family), "keydiff", keep=0.5)
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    made = model.generate(tiny_llms.ids(1, LENGTH), **settings)
    assert isinstance(made.cache, CompressedCache)
    assert made.cache.get_seq_length() == LENGTH + 3
    positions = made.cache.timeline.positions[0, 0]
    assert torch.equal(positions, torch.arange(LENGTH + 3, dtype=torch.int32))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "phi", "glm"])
def test_queries_are_turned_back_as_the_model_turned_them(family: str) -> None:
    """Partial, interleaved and per-layer rotations: R(a) q . R(b) k depends on a - b alone."""
    _, _, cache = compressed(family, "keydiff")
    rotate = cache.cores[0].facts.rotate
    size = cache.layers[-1].keys.shape[-1]
    q, k = torch.randn(2, 1, 2, 5, size).unbind(0)
    at = torch.arange(5)[None, None]
    assert torch.allclose(rotate(rotate(q, at + 7, False), at + 7, True), q, atol=1e-5)
    near = (rotate(q, at, False) * rotate(k, at + 3, False)).sum(-1)
    far = (rotate(q, at + 90, False) * rotate(k, at + 93, False)).sum(-1)
    assert torch.allclose(near, far, atol=1e-4)
    assert not torch.allclose(near, (q * k).sum(-1), atol=1e-2)


def test_latents_are_stored_once_and_refuse_what_needs_heads() -> None:
    """DeepSeek caches latents: budgets per head and merges of keys have nothing to work on."""
    _, _, cache = compressed("deepseek", "keydiff", keep=0.5)
    assert cache.cores[0].store.heads == 1
    for name, settings in (("fast", {}), ("keydiff", {"compressor": "merge"})):
        with pytest.raises(ValueError, match="caches one latent for all heads"):
            diffcache.wrap(tiny_families.family("deepseek"), name, **settings)
    with pytest.raises(ValueError, match="needs queries before rotation"):
        diffcache.wrap(tiny_families.family("deepseek"), "expectedattention")


@pytest.mark.parametrize("family", ["gemma3", "qwen3_next"])
def test_windows_and_linear_states_are_saved_with_the_rest(family: str, tmp_path: Any) -> None:
    model, _, cache = compressed(family, "keydiff")
    cache.save(tmp_path / "cache.safetensors")
    loaded = diffcache.load_cache(tmp_path / "cache.safetensors", model)
    with torch.no_grad():
        for turn in (tiny_llms.ids(1, 1, 2), tiny_llms.ids(1, 1, 3)):
            assert torch.equal(*(model(turn, cache=one).logits for one in (cache, loaded)))


def test_the_scores_are_the_models_own_attention() -> None:
    """kvpress #76, #81: models that norm their queries were scored without the norm."""
    plain = tiny_llms.qwen3("eager")
    prompt = tiny_llms.ids(1, 50)
    settings = {"scorer": {"kind": "window_attention", "window": 1, "kernel": 1}}
    model = diffcache.wrap(tiny_llms.qwen3(), "exact", **settings)
    seen = []
    from diffcache.kv.layer import CompressedLayer

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(
            CompressedLayer,
            "_compress_if_due",
            lambda layer, query, *rest: seen.append(
                layer.policy.scorer.score(layer._view(query, layer._index(50), *rest))
            ),
        )
        model(prompt)
        attentions = plain(prompt, output_attentions=True).attentions
    assert len(seen) == 3
    for scores, attention in zip(seen, attentions, strict=True):
        wanted = attention[:, :, -1].reshape(1, 2, 2, 50).mean(2)
        assert torch.allclose(scores[..., :-1], wanted[..., :-1], atol=1e-6)

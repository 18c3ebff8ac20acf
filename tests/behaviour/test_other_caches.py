"""Other pipelines, and other caches, in the same process."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from diffusers import (
    FirstBlockCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks import apply_first_block_cache
from diffusers.hooks.first_block_cache import _FBC_BLOCK_HOOK, _FBC_LEADER_BLOCK_HOOK
from toys import reused

import diffcache

CONFIGS = {
    "first block": lambda: FirstBlockCacheConfig(threshold=0.2),
    "taylorseer": lambda: TaylorSeerCacheConfig(use_lite_mode=True),
    "pab": lambda: PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        cross_attention_block_skip_range=2,
        current_timestep_callback=lambda: 500,
    ),
}


@pytest.fixture(params=CONFIGS)
def config(request):
    """A configuration of one of diffusers' own caches."""
    return CONFIGS[request.param]()


def test_diffusers_cache_first_then_ours_is_refused(config, tiny_wan, run_tiny):
    """Two caches would each spoil what the other keeps: an error that says what to call."""
    pipe = tiny_wan()
    pipe.transformer.enable_cache(config)
    with pytest.raises(ValueError, match=r"transformer\.disable_cache\(\)"):
        diffcache.wrap(pipe, "hold")
    assert "_diffcache" not in pipe.transformer.__dict__
    pipe.transformer.disable_cache()
    diffcache.wrap(pipe, "hold")
    assert torch.equal(run_tiny(pipe), run_tiny(diffcache.wrap(tiny_wan(), "hold")))
    assert reused(pipe) > 0


def test_ours_first_then_diffusers_cache_is_refused(config, tiny_wan, run_tiny):
    """The same the other way round; after unwrap diffusers' cache works as if we had not been."""
    pipe, twin = diffcache.wrap(tiny_wan(), "hold"), tiny_wan()
    with pytest.raises(ValueError, match=r"diffcache\.unwrap"):
        pipe.transformer.enable_cache(config)
    assert not pipe.transformer.is_cache_enabled
    assert torch.equal(run_tiny(pipe), run_tiny(diffcache.wrap(tiny_wan(), "hold")))
    diffcache.unwrap(pipe)
    for one in (pipe, twin):
        one.transformer.enable_cache(config)
    assert torch.equal(run_tiny(pipe), run_tiny(twin))
    assert "enable_cache" not in pipe.transformer.__dict__


@pytest.mark.parametrize("first", ["wrap", "apply"])
def test_hooks_put_on_by_hand_are_seen_too(first, tiny_wan, run_tiny):
    """`apply_first_block_cache` leaves no mark: refused at wrap, or when the next run begins."""
    pipe = tiny_wan()
    if first == "wrap":
        diffcache.wrap(pipe, "hold")
        run_tiny(pipe)
    apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=0.2))
    with pytest.raises(ValueError, match="fbc_leader_block_hook"):
        run_tiny(pipe) if first == "wrap" else diffcache.wrap(pipe, "hold")
    for block in pipe.transformer.blocks:
        for name in (_FBC_LEADER_BLOCK_HOOK, _FBC_BLOCK_HOOK):
            block._diffusers_hook.remove_hook(name, recurse=False)
    diffcache.wrap(pipe, "hold")
    assert torch.equal(run_tiny(pipe), run_tiny(diffcache.wrap(tiny_wan(), "hold")))
    assert torch.equal(run_tiny(diffcache.unwrap(pipe)), run_tiny(tiny_wan()))


@pytest.mark.peer_row(30)
def test_switching_one_pipeline_off_leaves_all_others_alone(tiny_wan, run_tiny):
    """cache-dit PR #1102: one pipeline switched off, and all others of its class raised.

    Two on, one off: both work, new ones are untouched, a deleted one is freed at once.
    """
    plain = run_tiny(tiny_wan())
    one, two = (diffcache.wrap(tiny_wan(), "hold") for _ in range(2))
    cached = run_tiny(one)
    before = str(diffcache.report(one))
    run_tiny(two)
    assert str(diffcache.report(one)) == before
    diffcache.unwrap(one)
    assert torch.equal(run_tiny(one), plain)
    assert torch.equal(run_tiny(two), cached)
    assert torch.equal(run_tiny(tiny_wan()), plain)
    reference = weakref.ref(two)
    del two
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("first", ["wrap", "cache-dit"])
def test_cache_dit_at_the_same_time_is_refused(first, tiny_wan, run_tiny):
    """cache-dit marks what it caches: at wrap, or at the next run's start, an error says so."""
    pipe = tiny_wan()
    if first == "wrap":
        diffcache.wrap(pipe, "hold")
        run_tiny(pipe)
    pipe.transformer._is_cached = True
    with pytest.raises(ValueError, match=r"cache_dit\.disable_cache"):
        run_tiny(pipe) if first == "wrap" else diffcache.wrap(pipe, "hold")
    del pipe.transformer._is_cached
    diffcache.wrap(pipe, "hold")
    assert torch.equal(run_tiny(pipe), run_tiny(diffcache.wrap(tiny_wan(), "hold")))

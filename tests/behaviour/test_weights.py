"""Weights that change: LoRA before, between and within runs; storage in other types."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from toys import apart, lively, reused, rows

import diffcache

NAMES = ["hold", "first_block", "taylorseer", "balanced"]


@pytest.mark.peer_row(31)
@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_may_change_before_and_between_runs(name, when, tiny_wan, run_tiny):
    """Comfy-WaveSpeed #36: a LoRA had to come before the cache.

    Weights written over, as fusing does: the next run is that of the changed model.
    """

    def fuse(pipe, scale):
        for block in pipe.transformer.blocks:
            block.attn1.to_q.weight.data.add_(scale * torch.eye(24))

    changed = tiny_wan()
    fuse(changed, 0.5)
    plain = run_tiny(changed)
    expected = run_tiny(diffcache.wrap(changed, name))
    pipe = diffcache.wrap(tiny_wan(), name)
    first = run_tiny(pipe) if when == "between" else None
    fuse(pipe, 0.5)
    assert torch.equal(run_tiny(pipe), expected)
    if first is not None:
        assert not torch.equal(first, expected)
    assert torch.equal(run_tiny(diffcache.unwrap(pipe)), plain)


@pytest.fixture
def add_lora():
    """Puts a seeded LoRA on the attention layers of a pipeline's transformer."""
    peft = pytest.importorskip("peft")

    def add(pipe, name="style", seed=1):
        config = peft.LoraConfig(
            r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            pipe.transformer.add_adapter(config, adapter_name=name)
        return pipe

    return add


@pytest.mark.peer_row(31)
@pytest.mark.parametrize("name", NAMES)
def test_a_lora_before_or_after_wrap(name, add_lora, tiny_wan, run_tiny):
    """The order is free: loaded first, wrapped first, wrapped and run first."""
    expected = run_tiny(diffcache.wrap(add_lora(tiny_wan()), lively(name)))
    assert not torch.equal(expected, run_tiny(diffcache.wrap(tiny_wan(), lively(name))))
    pipe = diffcache.wrap(tiny_wan(), lively(name))
    assert torch.equal(run_tiny(add_lora(pipe)), expected) and reused(pipe) > 0
    pipe = diffcache.wrap(tiny_wan(), lively(name))
    run_tiny(pipe)
    assert torch.equal(run_tiny(add_lora(pipe)), expected)


@pytest.mark.peer_row(31)
@pytest.mark.parametrize("name", NAMES)
def test_a_lora_through_its_life(name, add_lora, tiny_wan, run_tiny):
    """Scaled, switched off and on, a second one beside it, deleted: each run as on a fresh pipe."""
    pipe = diffcache.wrap(tiny_wan(), lively(name))

    def scaled(pipe, scale):
        add_lora(pipe)
        pipe.transformer.set_adapters("style", [scale])
        return pipe

    def fresh(change):
        made = tiny_wan()
        change(made)
        return run_tiny(diffcache.wrap(made, lively(name)))

    add_lora(pipe)
    run_tiny(pipe)
    pipe.transformer.set_adapters("style", [0.3])
    assert torch.equal(run_tiny(pipe), fresh(partial(scaled, scale=0.3)))
    pipe.transformer.disable_lora()
    assert torch.equal(run_tiny(pipe), fresh(lambda made: None))
    pipe.transformer.enable_lora()
    assert torch.equal(run_tiny(pipe), fresh(partial(scaled, scale=0.3)))
    pipe.transformer.delete_adapters("style")
    add_lora(pipe, "other", seed=2)
    assert torch.equal(run_tiny(pipe), fresh(partial(add_lora, name="other", seed=2)))
    pipe.transformer.delete_adapters("other")
    assert torch.equal(run_tiny(pipe), fresh(lambda made: None))
    diffcache.unwrap(pipe)
    assert torch.equal(run_tiny(pipe), run_tiny(tiny_wan()))


@pytest.mark.peer_row(31)
def test_a_fused_lora(add_lora, tiny_wan, run_tiny):
    """fuse_lora and unfuse_lora between runs, wrapped all the while."""
    pipe, twin = diffcache.wrap(tiny_wan(), "hold"), tiny_wan()
    for one in (pipe, twin):
        add_lora(one)
        one.transformer.fuse_lora()
    run_tiny(pipe)
    assert torch.equal(run_tiny(pipe), run_tiny(diffcache.wrap(twin, "hold")))
    pipe.transformer.unfuse_lora()
    pipe.transformer.delete_adapters("style")
    assert apart(run_tiny(pipe), run_tiny(diffcache.wrap(tiny_wan(), "hold"))) < 1e-4


@pytest.mark.peer_row(31)
@pytest.mark.parametrize("name", NAMES)
def test_a_lora_switched_in_mid_run(name, add_lora, tiny_wan, run_tiny):
    """In a callback, with `diffcache.reset`: the next step is computed, under the new weights.

    Weights are not watched within a run, so this one has to be said.
    """

    def switch(pipe, index, t, tensors):
        if index == 5:
            pipe.transformer.disable_lora()
            if wrapped(pipe):
                diffcache.reset(pipe)
        return tensors

    pipe, plain = (add_lora(tiny_wan()) for _ in range(2))
    policy = lively(name, min_steps=0)
    run_tiny(diffcache.wrap(pipe, policy), callback_on_step_end=switch)
    after = rows(pipe, "cond")
    assert len(after) == 6 and after[0].decision == "compute"
    for one in (pipe, plain):
        one.transformer.enable_lora()
    diffcache.wrap(pipe, policy, **policy.exact)
    expected = run_tiny(plain, callback_on_step_end=switch)
    assert torch.equal(run_tiny(pipe, callback_on_step_end=switch), expected)


def wrapped(pipe):
    return "_diffcache" in pipe.transformer.__dict__


@pytest.mark.peer_row(15)
@pytest.mark.parametrize("first", ["wrap", "cast"])
@pytest.mark.parametrize("name", NAMES)
def test_weights_stored_in_fp8(name, first, tiny_wan, run_tiny):
    """diffusers' layerwise casting, before or after wrap: the same steps, the same outputs."""

    def cast(pipe):
        pipe.transformer.enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
        )
        return pipe

    plain = run_tiny(cast(tiny_wan()))
    policy = lively(name)
    pipe = cast(tiny_wan()) if first == "cast" else tiny_wan()
    diffcache.wrap(pipe, policy)
    if first == "wrap":
        cast(pipe)
    found = run_tiny(pipe)
    assert reused(pipe) > 0 and apart(found, plain) < 0.5
    assert torch.equal(run_tiny(pipe), found)
    diffcache.wrap(pipe, policy, **policy.exact)
    assert torch.equal(run_tiny(pipe), plain)

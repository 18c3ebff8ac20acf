"""Time signals against what the models themselves hand on, and TeaCache's rule on a real Wan."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from toys import TEXT_DIM, TINY_WAN, fill_zeros, start

import diffcache
from diffcache.features.published import _entries
from diffcache.pipelines.signals import read_signal
from diffcache.signals import SignalCall

KNOWN = _entries("teacache")


def made(cls, **config):
    """A random model of a stock class."""
    import diffusers

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return fill_zeros(getattr(diffusers, cls)(**config)).requires_grad_(False)


def wan():
    call = {"hidden_states": start(2, 4, 2, 8, 8), "encoder_hidden_states": start(2, 6, TEXT_DIM)}
    return made("WanTransformer3DModel", **TINY_WAN), "attn1", {**call, "timestep": times(500.0)}


def flux():
    config = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 8}
    config |= {"num_attention_heads": 2, "joint_attention_dim": 16, "pooled_projection_dim": 16}
    config |= {"in_channels": 4, "axes_dims_rope": (4, 2, 2), "guidance_embeds": True}
    model = made("FluxTransformer2DModel", **config)
    call = {"hidden_states": start(2, 9, 4), "encoder_hidden_states": start(2, 5, 16)}
    call |= {"pooled_projections": start(2, 16), "img_ids": start(9, 3), "txt_ids": start(5, 3)}
    return model, "attn", {**call, "timestep": times(0.5), "guidance": times(4.0)}


def hunyuan():
    config = {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 8, "in_channels": 4}
    config |= {"num_attention_heads": 2, "text_embed_dim": 16, "pooled_projection_dim": 8}
    config |= {"num_refiner_layers": 1, "rope_axes_dim": (4, 2, 2), "out_channels": 4}
    call = {"hidden_states": start(2, 4, 1, 8, 8), "encoder_hidden_states": start(2, 5, 16)}
    call |= {"encoder_attention_mask": torch.ones(2, 5), "pooled_projections": start(2, 8)}
    model = made("HunyuanVideoTransformer3DModel", **config)
    return model, "attn", {**call, "timestep": times(500.0), "guidance": times(6000.0)}


def ltx():
    config = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 12}
    config |= {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 24}
    model = made("LTXVideoTransformer3DModel", caption_channels=TEXT_DIM, **config)
    call = {"hidden_states": start(2, 16, 4), "encoder_hidden_states": start(2, 6, TEXT_DIM)}
    call |= {"encoder_attention_mask": torch.ones(2, 6), "timestep": times(500.0)}
    return model, "attn1", {**call, "num_frames": 1, "height": 4, "width": 4}


def mochi():
    config = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4}
    config |= {"pooled_projection_dim": 16, "text_embed_dim": 16, "time_embed_dim": 4}
    call = {"hidden_states": start(2, 4, 1, 8, 8), "encoder_hidden_states": start(2, 6, 16)}
    call |= {"encoder_attention_mask": torch.ones(2, 6, dtype=torch.bool)}
    return made("MochiTransformer3DModel", **config), "attn1", {**call, "timestep": times(500.0)}


def times(value):
    return torch.full((2,), value)


def seen(model, attention, call):
    """The first block's arguments, and what its attention was handed."""
    block = next(m for n, m in model.named_modules() if n in ("blocks.0", "transformer_blocks.0"))
    given, handed = [], []
    hooks = [
        block.register_forward_pre_hook(lambda _, a, k: given.append((a, k)), with_kwargs=True),
        getattr(block, attention).register_forward_pre_hook(
            lambda _, a, k: handed.append(a[0] if a else k["hidden_states"]), with_kwargs=True
        ),
    ]
    with torch.no_grad():
        model(**call, return_dict=False)
    for hook in hooks:
        hook.remove()
    time = float(call["timestep"][0])
    return SignalCall(model, time, block, *given[0]), handed[0]


@pytest.mark.parametrize("maker", [wan, flux, hunyuan, ltx, mochi])
@torch.no_grad()
def test_input_is_what_attention_is_handed(maker):
    """The paper's timestep-modulated input, in the five ways in which blocks make it."""
    call, handed = seen(*maker())
    signal = read_signal(call, "input")
    assert torch.allclose(signal, handed, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(signal, read_plain(call), atol=0.1)


def read_plain(call):
    """The hidden states before norm and modulation."""
    return call.args[0] if call.args else call.kwargs["hidden_states"]


@pytest.mark.parametrize("timestep", [999.0, 500.0, 13.0])
@torch.no_grad()
def test_wans_embedding_and_modulation(timestep):
    """What its condition embedder hands on in a call, without a call."""
    model, _, call = wan()
    handed = []
    hook = model.condition_embedder.register_forward_hook(lambda m, a, out: handed.append(out))
    model(**{**call, "timestep": times(timestep)}, return_dict=False)
    hook.remove()
    for kind, expected in zip(("embedding", "modulation"), handed[0], strict=False):
        signal = read_signal(SignalCall(model, timestep), kind)
        assert signal.shape == (1, *expected.shape[1:])
        assert torch.allclose(signal.expand_as(expected), expected, atol=1e-6)


@torch.no_grad()
def test_other_models_show_their_embedding_as_an_argument():
    """`temb` of the blocks; a modulation by itself none of them has."""
    call, _ = seen(*flux())
    assert read_signal(call, "embedding").shape == (2, 16)
    assert read_signal(call, "modulation") is None
    assert read_signal(SignalCall(call.module, 0.5), "input") is None


def test_blocks_of_ones_own():
    """Neither norm nor time: the first tensor they are called with."""
    block, x = torch.nn.Linear(2, 2), start(1, 2)
    assert read_signal(SignalCall(block, 1.0, block, (x,), {}), "input") is x


def published_rule(signals, coefficients, threshold, warmup, tail):
    """TeaCache on Wan as published: which steps are skipped, by the signal of every step."""
    total, skips, steps = 0.0, [], len(signals)
    for i, signal in enumerate(signals):
        skip = False
        if warmup <= i < steps - tail:
            before = signals[i - 1]
            moved = float((signal - before).abs().mean() / before.abs().mean())
            total += max(0.0, float(np.poly1d(coefficients)(moved)))
            skip = total < threshold
        total = total if skip else 0.0
        skips.append(skip)
    return skips


@pytest.mark.parametrize(
    ("signal", "output", "usual", "warmup", "tail"),
    [("embedding", 0, 0.06, 1, 1), ("modulation", 1, 0.015, 5, 0)],
)
def test_the_published_rule_on_wan(tiny_wan, run_tiny, signal, output, usual, warmup, tail):
    """By what the embedder hands on in an uncached run; both branches, guidance on."""
    handed, pipe = [], tiny_wan()
    hook = pipe.transformer.condition_embedder.register_forward_hook(
        lambda m, a, out: handed.append(out[output])
    )
    run_tiny(pipe, steps=50)
    hook.remove()
    moved = [float((b - a).abs().mean() / a.abs().mean()) for a, b in pairwise(handed[::2])]
    # The polynomial of Wan 1.3B, moved to where this random model's signal lies.
    known = KNOWN["wan2.1-t2v-1.3b"]["signals"][signal]["coefficients"]
    scale = usual / float(np.median(moved))
    coefficients = tuple(c * scale ** (4 - i) for i, c in enumerate(known))
    for threshold in (0.05, 0.1, 0.3):
        expected = published_rule(handed[::2], coefficients, threshold, warmup, tail)
        settings = {"signal": signal, "warmup_steps": warmup, "tail_steps": tail}
        diffcache.wrap(pipe, "teacache", coefficients=coefficients, threshold=threshold, **settings)
        run_tiny(pipe, steps=50)
        for branch in ("cond", "uncond"):
            rows = [row for row in diffcache.report(pipe).rows if row.branch == branch]
            assert [row.decision == "reuse" for row in rows] == expected
        assert 0 < sum(expected) < 50


def test_wan_at_the_model_site(tiny_wan, run_tiny):
    """The embedding needs no block, so the whole output can be held; the decisions are the same."""
    settings = {"signal": "embedding", "threshold": 0.6, "warmup_steps": 2}
    found = []
    for site in ("stack", "model"):
        pipe = diffcache.wrap(tiny_wan(), "teacache", site=site, **settings)
        run_tiny(pipe, steps=30)
        found.append([row.decision for row in diffcache.report(pipe).rows])
    assert found[0] == found[1] and "reuse" in found[0]


def test_a_signal_that_is_not_there_computes_and_says_so(tiny_wan, run_tiny):
    """The modulated input at the model site: everything is computed, with a warning."""
    pipe, plain = tiny_wan(), tiny_wan()
    diffcache.wrap(pipe, "teacache", site="model", signal="input", threshold=9.0)
    with pytest.warns(diffcache.DiffcacheWarning, match="skipped nothing"):
        out = run_tiny(pipe)
    assert torch.equal(out, run_tiny(plain))

"""Wan-Animate 2's transformer, driven as its modular pipeline does, segment by segment.

Its block mask is always built by a compiled function; on a CPU an equal one is built uncompiled.
"""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import lru_cache, partial

import diffusers
import pytest
import torch
from diffusers.models.transformers import transformer_wan_animate_2 as animate_2
from toys import fitting, lively, start

import diffcache

SEGMENTS, STEPS = 2, 9
GRID = torch.tensor([[2, 1, 1]])
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch):
    build = animate_2.create_block_mask
    monkeypatch.setattr(
        animate_2, "create_block_mask", lambda *a, **k: build(*a, **{**k, "_compile": False})
    )


class Pipe:
    """What `wrap` reads of a pipeline: components, and a scheduler."""

    def __init__(self, transformer, scheduler):
        self.transformer, self.scheduler = transformer, scheduler
        self.components = {"transformer": transformer, "scheduler": scheduler}


def pipeline():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformer = diffusers.WanAnimate2Transformer3DModel(
            text_len=6,
            in_dim=8,
            dim=32,
            ffn_dim=32,
            freq_dim=16,
            text_dim=16,
            out_dim=4,
            num_heads=2,
            num_layers=3,
            use_img_emb=False,
        ).eval()
        for parameter in transformer.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.1)
    return Pipe(transformer, diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0))


@torch.no_grad()
def run(pipe, around=None):
    """Latents of each segment, and the keys that its extract pass wrote.

    Args:
        around: makes the context manager within which a segment's calls are made.
    """
    parts = []
    for segment in range(SEGMENTS):
        with around(segment) if around else nullcontext():
            parts.append(run_segment(pipe, segment))
    return tuple(map(torch.stack, zip(*parts, strict=True)))


def run_segment(pipe, segment):
    pipe.scheduler.set_timesteps(STEPS)
    times = pipe.scheduler.timesteps
    cache = animate_2.WanAnimate2KVCache(3)
    call = partial(pipe.transformer, kv_cache=cache, seq_len=2)
    text = {"encoder_hidden_states": [start(6, 16)]}
    condition = {"condition_latents": [start(4, 2, 2, 2, seed=segment)]}
    driving = [start(4, 2, 2, 2, seed=10 + segment)]
    extract = {"kv_cache_mode": "extract", "offset_grid_sizes": GRID, **text, **condition}
    call(driving, timestep=times[:1], **extract)
    written = cache.get(0).get()[0].clone()
    latents = start(4, 2, 2, 2, seed=20 + segment)
    for t in times:
        velocities = []
        for uncond in (False, True):
            text = {"encoder_hidden_states": [start(6, 16, seed=int(uncond))]}
            cached = {"kv_cache_mode": "cached", "reference_grid_sizes": GRID, **text}
            geometry = {"origin_len": 5, "origin_area": [16, 16], "is_uncondtion": uncond}
            output = call([latents], timestep=t[None], **cached, **condition, **geometry)
            velocities.append(output.sample[0])
        velocity = velocities[1] + 2 * (velocities[0] - velocities[1])
        latents = pipe.scheduler.step(velocity[None], t, latents[None])[0][0]
    return latents, written


@lru_cache(None)
def plain():
    """Latents and written keys without us."""
    return run(pipeline())


def test_exact_settings_change_no_bit():
    """Latents and written keys are those of a transformer never wrapped."""
    exact = fitting("first_block")
    pipe = diffcache.wrap(pipeline(), exact.with_settings(**exact.exact))
    assert all(map(torch.equal, run(pipe), plain()))


@pytest.mark.parametrize("policy", ["hold", "first_block"])
def test_extract_passes_write_and_segments_begin_anew(policy):
    """Extract passes are computed in full; the scheduler, armed for each segment, parts them."""
    pipe = diffcache.wrap(pipeline(), lively(policy))
    latents, written = run(pipe)
    assert torch.equal(written, plain()[1])
    assert not torch.equal(latents, plain()[0])
    rows = [row for row in diffcache.report(pipe).rows if row.reason != "kv_write"]
    counts = Counter(row.branch for row in rows if row.seconds)  # of the last segment
    assert sorted(counts.values()) == [STEPS, STEPS]
    assert {row.decision for row in rows if row.step == 0} == {"compute"}
    assert any(row.decision == "reuse" for row in rows)
    assert torch.equal(run(pipe)[0], latents)


def test_segments_counted_by_the_user():
    """`diffcache.chunk` gives every row its segment, in one report; the results are the same."""
    pipe = diffcache.wrap(pipeline(), "hold")
    expected = run(pipe)
    counted = run(pipe, partial(diffcache.chunk, pipe))
    assert all(map(torch.equal, counted, expected))
    rows = diffcache.report(pipe).rows
    counts = Counter(row.chunk for row in rows if row.reason != "kv_write")
    assert counts == dict.fromkeys(range(SEGMENTS), 2 * STEPS)

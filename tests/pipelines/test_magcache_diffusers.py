"""MagCache here and as diffusers' hook: the same curve, the same decisions."""

from __future__ import annotations

import ast
import random
from itertools import pairwise

import pytest
from toys import rows

import diffcache
from diffcache.features.magnitudes import as_curve
from diffcache.magnitudes import measure

hooks = pytest.importorskip("diffusers.hooks.mag_cache")

STEPS = 20


def levels_of(pipe, steps=STEPS):
    pipe.scheduler.set_timesteps(steps)
    return [float(level) for level in pipe.scheduler.sigmas[:steps]]


def their_decisions(pipe, run_tiny, **settings):
    """Which calls skip the blocks under diffusers' hook: those in which the second one is idle."""
    computed, calls = [], []
    attention = pipe.transformer.blocks[1].attn1
    handles = [
        attention.register_forward_hook(lambda *_: computed.append(len(calls))),
        pipe.transformer.register_forward_hook(lambda *_: calls.append(True)),
    ]
    pipe.transformer.enable_cache(hooks.MagCacheConfig(num_inference_steps=STEPS, **settings))
    out = run_tiny(pipe, steps=STEPS)
    pipe.transformer.disable_cache()
    for handle in handles:
        handle.remove()
    return out, [call not in computed for call in range(len(calls))]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("threshold", "most", "retention"), [(0.06, 3, 0.2), (0.3, 5, 0.0)])
def test_same_decisions_and_latents(seed, threshold, most, retention, tiny_wan, run_tiny):
    """With random ratios; both branches of guidance go by the same ones there."""
    rng = random.Random(seed)
    ratios = [1.0, *(rng.uniform(0.94, 1.05) for _ in range(STEPS - 1))]
    settings = {"threshold": threshold, "retention_ratio": retention}
    theirs, expected = their_decisions(
        tiny_wan(), run_tiny, mag_ratios=ratios, max_skip_steps=most, **settings
    )
    pipe = tiny_wan()
    curves = (as_curve("all", levels_of(pipe), ratios),)
    ours = {"threshold": threshold, "max_skips": most, "retention": retention}
    diffcache.wrap(pipe, "magcache", curves=curves, **ours)
    latents = run_tiny(pipe, steps=STEPS)
    assert [row.decision == "reuse" for row in rows(pipe)] == expected
    assert 0 < sum(expected) < 2 * STEPS
    assert float((latents - theirs).abs().max()) < 1e-4


def test_measured_curve_equals_their_calibration(tiny_wan, run_tiny, capsys):
    """Step ratios of one full run, branch by branch, as diffusers' calibration prints them."""
    theirs = tiny_wan()
    config = hooks.MagCacheConfig(num_inference_steps=STEPS, calibrate=True)
    theirs.transformer.enable_cache(config)
    run_tiny(theirs, steps=STEPS)
    lines = capsys.readouterr().out.splitlines()
    printed = [ast.literal_eval(line) for line in lines if line.startswith("[1.0")]
    pipe = tiny_wan()
    policy = measure(pipe, lambda: run_tiny(pipe, steps=STEPS))["transformer"]
    assert "_diffcache" not in pipe.transformer.__dict__
    for (branch, levels, sizes), ratios in zip(policy.gate.curves, printed, strict=True):
        assert branch in ("cond", "uncond") and list(levels) == pytest.approx(levels_of(pipe))
        ours = [1.0, *(b / a for a, b in pairwise(sizes))]
        assert ours == pytest.approx(ratios, rel=1e-4)
    diffcache.wrap(pipe, policy)
    for steps in (10, 20, 27, 50):
        run_tiny(pipe, steps=steps)
        assert any(row.decision == "reuse" for row in rows(pipe))

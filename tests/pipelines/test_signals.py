"""TeaCache's time signals against what they are by definition, on tiny pipelines."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from toys import rows

import diffcache

STEPS = 20
POLYNOMIAL = {"coefficients": (1.0, 0.0)}


@pytest.fixture(autouse=True)
def no_gradients():
    """As in a pipeline call."""
    with torch.no_grad():
        yield


def relative(now, before):
    return float((now - before).abs().mean() / before.abs().mean())


def metrics(pipe, branch="cond"):
    return [row.metric for row in rows(pipe, branch)]


def embeddings(pipe, steps, modulation):
    """Wan's time embedding at each timestep, by the embedder's own forward."""
    pipe.scheduler.set_timesteps(steps)
    embedder = pipe.transformer.condition_embedder
    text = torch.zeros(1, 2, 16)
    found = [embedder(t.reshape(1), text)[:2] for t in pipe.scheduler.timesteps]
    return [pair[1] if modulation else pair[0] for pair in found]


@pytest.mark.parametrize("signal", ["embedding", "modulation"])
def test_wan_time_signal(signal, tiny_wan, run_tiny):
    """e, or e0 with retention steps: the change since the call before, in both branches alike."""
    pipe = tiny_wan()
    values = embeddings(pipe, STEPS, signal == "modulation")
    expected = [relative(b, a) for a, b in pairwise(values)]
    diffcache.wrap(pipe, "teacache", signal=signal, threshold=1.5 * max(expected), **POLYNOMIAL)
    run_tiny(pipe, steps=STEPS)
    for branch in ("cond", "uncond"):
        measured = metrics(pipe, branch)
        assert measured[0] is None and measured[1:] == pytest.approx(expected, rel=1e-4)
    assert any(row.decision == "reuse" for row in rows(pipe))


@pytest.mark.parametrize("site", ["stack", "model"])
def test_wan_decisions_ignore_the_content(site, tiny_wan, run_tiny):
    """Another seed and prompt, the same timesteps: the same steps are skipped."""
    decisions = []
    settings = {"signal": "embedding", "threshold": 0.5, "site": site, **POLYNOMIAL}
    pipe = diffcache.wrap(tiny_wan(), "teacache", **settings)
    for seed in (0, 1):
        run_tiny(pipe, steps=STEPS, seed=seed)
        decisions.append([row.decision for row in rows(pipe, "cond")])
    assert decisions[0] == decisions[1] and set(decisions[0]) == {"compute", "reuse"}


def test_a_known_model_brings_its_signal_and_polynomial(tiny_wan, run_tiny):
    """Named outright; the report says whose numbers are used."""
    pipe = diffcache.wrap(tiny_wan(), "teacache", model="wan2.1-t2v-1.3b")
    run_tiny(pipe, steps=STEPS)
    notes = " ".join(diffcache.report(pipe).summary["notes"])
    assert "TeaCache's polynomial for wan2.1-t2v-1.3b (threshold 0.08)" in notes
    values = embeddings(pipe, STEPS, modulation=False)
    assert metrics(pipe)[1] == pytest.approx(relative(values[1], values[0]), rel=1e-4)


def test_modulated_input(tiny_wan, run_tiny):
    """norm1(h) * (1 + scale) + shift of the first block, as that block's attention is given it."""
    plain, seen = tiny_wan(), []
    plain.transformer.blocks[0].attn1.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((*args, *kwargs.values())[0].clone()), with_kwargs=True
    )
    run_tiny(plain, steps=9, guidance=1.0)
    pipe = diffcache.wrap(tiny_wan(), "teacache", signal="input", threshold=0.0)
    run_tiny(pipe, steps=9, guidance=1.0)
    expected = [relative(b, a) for a, b in pairwise(seen)]
    measured = [row.metric for row in rows(pipe)]
    assert measured[1:] == pytest.approx(expected, rel=1e-3)

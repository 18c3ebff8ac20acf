"""The step mask against a hand-written automaton, and DBCache against its published rule."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from toy_loop import ToyModel, ToyPipe, mean, noise, sigmas, skipped
from toys import latents

import diffcache
from diffcache.features.masks import MaskedThreshold

MASK = (1, 1, 0, 0, 1, 0, 0, 0, 1, 0)


def dbcache(model, steps, front, back, threshold, warmup, mask=None, static=False):
    """DBCache (card 2.2): front residual against the last computed step's; the middle is held."""
    x, levels, decisions = noise(1), sigmas(steps), []
    reference = rest = None
    for i, (sigma, after) in enumerate(itertools.pairwise(levels)):
        hidden = x
        for block in model.blocks[:front]:
            hidden = block(hidden, sigma)
        residual, entry = hidden - x, hidden
        skip = i >= warmup and not (mask and mask[i])
        if skip and not static:
            skip = mean(residual - reference) / mean(reference) < threshold
        if skip:
            hidden = entry + rest
        else:
            for block in model.blocks[front : 4 - back]:
                hidden = block(hidden, sigma)
            reference, rest = residual, hidden - entry
        for block in model.blocks[4 - back :]:
            hidden = block(hidden, sigma)
        decisions.append(skip)
        x = x + (after - sigma) * model.head(hidden)
    return x, decisions


def run(steps, **settings):
    pipe = diffcache.wrap(ToyPipe(), "dbcache", **settings)
    return pipe(steps), skipped(pipe)


@pytest.mark.parametrize(("front", "back"), [(1, 0), (1, 1), (2, 1), (3, 0)])
@pytest.mark.parametrize("threshold", [0.05, 0.2, 0.5])
def test_dbcache_equals_published_rule(front, back, threshold):
    """The same steps are skipped, and the blocks behind run on top of what was held."""
    expected, decisions = dbcache(ToyModel(), 24, front, back, threshold, 8)
    out, ours = run(24, front=front, back=back, threshold=threshold)
    assert ours == decisions and not any(ours[:8])
    assert torch.allclose(out, expected, atol=1e-5)
    assert any(dbcache(ToyModel(), 24, front, back, 0.5, 8)[1])


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("threshold", [0.02, 0.1])
def test_dbcache_under_a_mask(static, threshold):
    """At a 1 always computed; at a 0 static reuses blindly, dynamic asks the threshold."""
    expected, decisions = dbcache(ToyModel(), 10, 1, 0, threshold, 2, MASK, static)
    settings = {"front": 1, "warmup_steps": 2, "mask": MASK, "static": static}
    out, ours = run(10, threshold=threshold, **settings)
    assert ours == decisions and torch.allclose(out, expected, atol=1e-5)
    assert (ours == [not bit for bit in MASK]) == static


def test_a_mask_of_another_length_is_read_along_the_run():
    """20 steps under a mask of 10: the ends stay ends, and about the same share is reused."""
    _, ours = run(20, front=1, warmup_steps=2, mask=MASK, static=True)
    assert not any(ours[:2]) and ours[-1] and abs(sum(ours) - 12) <= 1


def test_threshold_zero_rules_the_mask_too():
    """`exact` names the threshold alone."""
    out, ours = run(10, front=1, mask=MASK, static=True, threshold=0.0, warmup_steps=1)
    assert not any(ours) and torch.equal(out, ToyPipe()(10))


@pytest.mark.parametrize("seed", range(10))
def test_mask_equals_automaton(seed, cell_of, at):
    """With and without a run length, any values."""
    rng, gate = random.Random(seed), MaskedThreshold(threshold=0.05, mask=MASK)
    for num_steps in (None, len(MASK)):
        for step, bit in enumerate(MASK):
            value = rng.choice([None, 0.01, 0.05, 0.2])
            expected = not bit and value is not None and value < 0.05
            assert gate.reuse(at(step, num_steps), value, cell_of()) == expected
    assert not gate.reuse(at(8), 0.0, cell_of()) and gate.reuse(at(40), 0.0, cell_of())


def test_a_forecaster_in_the_middle():
    """By override; on a smooth model it comes nearer than holding at the same decisions."""
    settings = {"front": 1, "warmup_steps": 4, "mask": MASK * 2, "static": True}
    full = ToyPipe()(20)
    held, first = run(20, **settings)
    forecast, second = run(20, predictor={"kind": "polynomial", "order": 1}, **settings)
    assert first == second and mean(forecast - full) < mean(held - full)


def test_too_few_blocks_are_refused_at_wrap():
    """The published eight in front do not fit into four; nothing is left on the model."""
    pipe = ToyPipe()
    before = set(pipe.transformer.__dict__)
    with pytest.raises(ValueError, match=r"\(4\), got 8: give fewer, as in front=1, back=0"):
        diffcache.wrap(pipe, "dbcache")
    assert set(pipe.transformer.__dict__) == before
    assert pipe.transformer(latents(), timestep=torch.tensor(500.0)).isfinite().all()


def test_most_reuses_in_a_run(cell_of, at):
    """The count is of the whole run, per branch."""
    _, ours = run(24, front=1, threshold=9.0, max_reused=5)
    assert sum(ours) == 5 and all(ours[8:13])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask": (1, 2)}, "mask must be 1 (compute) or 0 (may be reused) for each step"),
        ({"mask": ()}, "mask must be 1 (compute) or 0 (may be reused) for each step"),
        ({"static": True}, "static needs a mask: give mask=(1, 1, 0, ...)"),
        ({"max_reused": -1}, "max_reused must be at least 0, got -1"),
        ({"threshold": -1}, "threshold must be at least 0, got -1"),
    ],
)
def test_settings_are_checked(settings, message):
    """What was expected stands in the message."""
    with pytest.raises(ValueError) as caught:
        MaskedThreshold(**settings)
    assert message in str(caught.value)

"""Named policies against re-implementations of their published rules, on a toy model."""

from __future__ import annotations

import itertools

import pytest
import torch
from toy_loop import ToyModel, ToyPipe, mean, noise, sigmas, skipped
from toys import fitting

import diffcache


def run(policy, steps, **settings):
    """Final latents and the list of reused steps under a policy."""
    pipe = diffcache.wrap(ToyPipe(), fitting(policy), **settings)
    return pipe(steps), skipped(pipe)


def easycache(model, steps, threshold, warmup, tail):
    """EasyCache as published (card 2.4): one error sum, k between computed steps, hold out - x."""
    x, levels, decisions = noise(1), sigmas(steps), []
    error, rate, last_in, last_out, previous = 0.0, None, None, None, None
    for i, (sigma, after) in enumerate(itertools.pairwise(levels)):
        skip = False
        if warmup <= i < steps - tail and rate is not None:
            error += rate * mean(x - previous) / mean(last_out)
            skip = error < threshold
        previous = x
        if skip:
            out = x + (last_out - last_in)
        else:
            out, error = model(x, sigma * 1000), 0.0
            if last_in is not None:
                rate = mean(out - last_out) / mean(x - last_in)
            last_in, last_out = x, out
        decisions.append(skip)
        x = x + (after - sigma) * out
    return x, decisions


def first_block(model, steps, threshold):
    """FBCache (card 2.2): compare the first block's residual with the last computed step's."""
    x, levels, decisions = noise(1), sigmas(steps), []
    reference = rest = None
    for sigma, after in itertools.pairwise(levels):
        front = model.blocks[0](x, sigma)
        residual = front - x
        skip = reference is not None and mean(residual - reference) / mean(reference) < threshold
        if skip:
            hidden = front + rest
        else:
            hidden = front
            for block in model.blocks[1:]:
                hidden = block(hidden, sigma)
            reference, rest = residual, hidden - front
        decisions.append(skip)
        x = x + (after - sigma) * model.head(hidden)
    return x, decisions


def taylorseer(model, steps, interval, warmup, order):
    """TaylorSeer (card 2.5) on the stack's residual, by divided differences over sigma."""
    x, levels, decisions, history = noise(1), sigmas(steps), [], []
    since = 0
    for i, (sigma, after) in enumerate(itertools.pairwise(levels)):
        skip = i >= warmup and since < interval - 1
        if skip:
            hidden, since = x + newton(history[-order - 1 :], float(sigma)), since + 1
        else:
            hidden = x
            for block in model.blocks:
                hidden = block(hidden, sigma)
            history.append((float(sigma), hidden - x))
            since = 0
        decisions.append(skip)
        x = x + (after - sigma) * model.head(hidden)
    return x, decisions


def newton(points, time):
    """The interpolating polynomial through (time, tensor) points in Newton's form."""
    times, table = [t for t, _ in points], [value for _, value in points]
    total, factor = table[0], 1.0
    for level in range(1, len(points)):
        pairs = zip(table[:-1], table[1:], times[:-level], times[level:], strict=True)
        table = [(b - a) / (tb - ta) for a, b, ta, tb in pairs]
        factor *= time - times[level - 1]
        total = total + factor * table[0]
    return total


@pytest.mark.parametrize("steps", [14, 30])
@pytest.mark.parametrize("threshold", [0.01, 0.05, 0.15, 0.4])
def test_easycache_equals_published_rule(steps, threshold):
    """The same steps are skipped, and the same latents come out."""
    expected, decisions = easycache(ToyModel(), steps, threshold, warmup=3, tail=1)
    out, ours = run("easycache", steps, threshold=threshold, warmup_steps=3)
    assert ours == decisions
    assert torch.allclose(out, expected, atol=1e-5)


def test_easycache_defaults():
    """Ten warm-up steps and the last one are computed; between them a mix."""
    _, ours = run("easycache", 40, threshold=0.1)
    assert not any(ours[:10]) and not ours[-1]
    assert any(ours[10:-1]) and not all(ours[10:-1])
    assert ours == easycache(ToyModel(), 40, 0.1, warmup=10, tail=1)[1]


@pytest.mark.parametrize("steps", [9, 24])
@pytest.mark.parametrize("threshold", [0.02, 0.05, 0.1, 0.3])
def test_first_block_equals_published_rule(steps, threshold):
    """The same steps are skipped, and the same latents come out."""
    expected, decisions = first_block(ToyModel(), steps, threshold)
    out, ours = run("first_block", steps, threshold=threshold)
    assert ours == decisions
    assert torch.allclose(out, expected, atol=1e-5)


def test_thresholds_above_are_not_trivial():
    """Within the thresholds tried some runs mix both decisions, so the equalities say something."""
    for rule in (first_block, lambda m, s, t: easycache(m, s, t, 3, 1)):
        mixed = [0 < sum(rule(ToyModel(), 24, t)[1]) < 20 for t in (0.02, 0.05, 0.1, 0.15, 0.3)]
        assert any(mixed)


@pytest.mark.parametrize(("interval", "order"), [(5, 1), (3, 1), (2, 2), (4, 0), (3, 2)])
def test_taylorseer_equals_published_rule(interval, order):
    """Computed every n-th step after warm-up; in between the polynomial over sigma."""
    expected, decisions = taylorseer(ToyModel(), 20, interval, warmup=3, order=order)
    out, ours = run("taylorseer", 20, interval=interval, order=order)
    assert ours == decisions
    assert torch.allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize("steps", [10, 25, 50])
@pytest.mark.parametrize("fraction", [0.4, 0.5, 0.7])
def test_hold_equals_a_plain_loop(steps, fraction):
    """The asked share is computed, every other step gets the last output."""
    latents, ours = run("hold", steps, fraction=fraction)
    assert ours.count(False) == max(4, round(fraction * steps))
    assert not any(ours[:3]) and not ours[-1]
    model, x, levels, out = ToyModel(), noise(1), sigmas(steps), None
    for i, skip in enumerate(ours):
        out = out if skip else model(x, levels[i] * 1000)
        x = x + (levels[i + 1] - levels[i]) * out
    assert torch.allclose(latents, x, atol=1e-6)


@pytest.mark.parametrize("steps", [10, 20, 50])
@pytest.mark.parametrize("name", ["forecast", "quality", "balanced", "fast"])
def test_forecast_computes_its_share(name, steps):
    """On a smooth model nothing is computed out of turn, and the latents stay near."""
    policy = diffcache.get_policy(name)
    out, ours = run(name, steps)
    guards, share = policy.guards, policy.gate.share(steps)
    assert ours.count(False) == max(guards.warmup_steps + guards.tail_steps, round(share * steps))
    full = ToyPipe()(steps)
    held, _ = run("hold", steps, fraction=share)
    assert mean(out - full) < 0.5 * mean(held - full)


def test_forecast_computes_out_of_turn_when_wrong():
    """With a bound on the error that every check exceeds, all steps are computed."""
    _, ours = run("forecast", 20, max_error=0.0)
    assert sum(ours) <= 1 and len(ours) == 20


@pytest.mark.parametrize("name", diffcache.policies())
def test_exact_settings_are_bit_identical(name):
    """Each policy names the settings that make it exact."""
    policy = diffcache.get_policy(name)
    assert policy.exact
    out, ours = run(name, 12, **policy.exact)
    assert not any(ours) and torch.equal(out, ToyPipe()(12))


@pytest.mark.parametrize("name", diffcache.policies())
def test_second_run_equals_the_first(name):
    """And other step counts in between change nothing."""
    pipe = diffcache.wrap(ToyPipe(), fitting(name))
    first, decisions = pipe(24), skipped(pipe)
    pipe(13)
    assert torch.equal(pipe(24), first) and skipped(pipe) == decisions


@pytest.mark.parametrize("name", diffcache.policies())
def test_short_runs_are_full(name):
    """Fewer than eight steps are computed in full."""
    out, ours = run(name, 7)
    assert ours == [False] * 7 and torch.equal(out, ToyPipe()(7))


@pytest.mark.parametrize("name", diffcache.policies())
def test_every_policy_says_what_it_is(name):
    """Name, one-line summary, source; exact names settings that exist."""
    policy = diffcache.get_policy(name)
    assert policy.name == name and policy.source
    assert policy.summary and "\n" not in policy.summary
    assert set(policy.exact) <= set(policy.settings())


@pytest.mark.parametrize("name", [n for n in diffcache.policies() if n != "exact"])
def test_every_policy_saves_by_default(name):
    """A policy that reused nothing in 50 smooth steps would be of no use."""
    assert any(run(name, 50)[1])

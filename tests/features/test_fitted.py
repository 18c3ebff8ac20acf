"""TeaCache's gate against its published rule, and where its numbers come from."""

from __future__ import annotations

import itertools

import pytest
import torch
from toy_loop import ToyModel, ToyPipe, mean, noise, sigmas, skipped

import diffcache
from diffcache.features.fitted import FittedAccumulate
from diffcache.features.published import _entries
from diffcache.features.sites import Stack

POLYNOMIAL = (2.0, -1.5, 1.1, 0.01)
KNOWN = _entries("teacache")


def polynomial(coefficients, x):
    powers = range(len(coefficients) - 1, -1, -1)
    return sum(c * x**power for c, power in zip(coefficients, powers, strict=True))


def teacache(model, steps, coefficients, threshold, warmup, tail):
    """TeaCache (card 2.1): the change of the first block's input, through a polynomial, summed."""
    x, levels, decisions = noise(1), sigmas(steps), []
    total, previous, rest = 0.0, None, None
    for i, (sigma, after) in enumerate(itertools.pairwise(levels)):
        skip = False
        if warmup <= i < steps - tail:
            total += polynomial(coefficients, mean(x - previous) / mean(previous))
            skip = total < threshold
        previous, hidden = x, x
        if not skip:
            total = 0.0
            for block in model.blocks:
                hidden = block(hidden, sigma)
            rest = hidden - x
        decisions.append(skip)
        x = x + (after - sigma) * model.head(x + rest)
    return x, decisions


def run(steps, **settings):
    pipe = diffcache.wrap(ToyPipe(), "teacache", **settings)
    return pipe(steps), skipped(pipe), diffcache.report(pipe).summary["notes"]


@pytest.mark.parametrize("coefficients", [POLYNOMIAL, (1.0, 0.0), (0.5, 0.0, 0.02)])
@pytest.mark.parametrize("threshold", [0.05, 0.1, 0.3])
@pytest.mark.parametrize(("warmup", "tail"), [(1, 1), (5, 0)])
def test_equals_the_published_rule(coefficients, threshold, warmup, tail):
    """The same steps are skipped, and the stack's residual is held there."""
    ends = {"warmup_steps": warmup, "tail_steps": tail}
    expected, decisions = teacache(ToyModel(), 30, coefficients, threshold, warmup, tail)
    out, ours, notes = run(30, threshold=threshold, coefficients=coefficients, **ends)
    assert ours == decisions and torch.allclose(out, expected, atol=1e-5)
    assert 0 < sum(teacache(ToyModel(), 30, coefficients, 0.1, warmup, tail)[1]) < 29
    assert not any("polynomial" in note for note in notes)


def test_a_model_without_a_polynomial_sums_the_change_itself():
    """No other model's is borrowed, and the report says what is done."""
    expected, decisions = teacache(ToyModel(), 30, (1.0, 0.0), 0.07, 1, 1)
    out, ours, notes = run(30)
    assert ours == decisions and sum(ours) > 0 and torch.allclose(out, expected, atol=1e-5)
    assert any("published neither for this model" in n and "coefficients=" in n for n in notes)


def change_of(gate, value, cell, at, num_steps=None):
    """What one step with this metric adds to the sum."""
    cell.numbers.clear()
    gate.reuse(at(1, num_steps), value, cell)
    return cell.numbers["accumulated"]


@pytest.mark.parametrize("name", KNOWN)
def test_published_polynomials(name, cell_of, at):
    """At the fitted steps the sum grows by the polynomial's value; below 0 it does not shrink."""
    for signal, known in KNOWN[name]["signals"].items():
        probe = {"kind": "time_signal", "signal": signal}
        gate = FittedAccumulate(model=name)
        cell = cell_of(site=Stack(), gate=gate, probe=probe, metric="previous_l1")
        seen = []
        for value in (0.0, 0.01, 0.05, 0.12, 0.2, 0.3):
            expected = max(0.0, polynomial(known["coefficients"], value))
            found = change_of(gate, value, cell, at, KNOWN[name]["steps"])
            assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
            seen.append(found)
        assert max(seen) > 0
        cell.numbers.clear()
        assert gate.reuse(at(1), 0.0, cell) == (
            max(0.0, known["coefficients"][-1]) < known["threshold"]
        )


@pytest.mark.parametrize("steps", [10, 25, 50, 100])
def test_other_lengths_are_brought_to_the_fitted_spacing(steps, cell_of, at):
    """A signal of constant speed moves twice as far in half the steps; the sum of a run agrees."""
    gate = FittedAccumulate(coefficients=POLYNOMIAL, fitted_steps=50)
    speed = 2.0  # change of the signal in a whole run
    total = steps * change_of(gate, speed / steps, cell_of(), at, steps)
    assert total == pytest.approx(50 * polynomial(POLYNOMIAL, speed / 50), rel=1e-9)


def test_the_sum_starts_again_at_computed_steps(cell_of, at):
    """And a step without a metric is computed."""
    gate, cell = FittedAccumulate(threshold=0.25, coefficients=(1.0, 0.0)), cell_of()
    decisions = []
    for value in (0.1, 0.1, 0.1, 0.1, None, 0.2):
        reuse = gate.reuse(at(1), value, cell)
        decisions.append(reuse)
        if not reuse:
            gate.learn(at(1), cell)
    assert decisions == [True, True, False, True, False, True]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": -0.1}, "threshold must be at least 0, got -0.1"),
        ({"threshold": float("nan")}, "threshold must be at least 0, got nan"),
        ({"coefficients": ()}, "coefficients must be at least one number, got none"),
        ({"fitted_steps": 0}, "fitted_steps must be at least 1, got 0"),
        ({"model": "flux"}, "teacache knows no model 'flux'"),
    ],
)
def test_settings_are_checked(settings, message):
    """What was expected stands in the message."""
    with pytest.raises(ValueError) as caught:
        FittedAccumulate(**settings)
    assert message in str(caught.value)


@pytest.mark.parametrize("signal", ["time", 3])
def test_unknown_signals_are_refused(signal):
    """The known ones are named."""
    with pytest.raises(ValueError, match="signal must be one of embedding, modulation, input"):
        diffcache.get_policy("teacache", signal=signal)

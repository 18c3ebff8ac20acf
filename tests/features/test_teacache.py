"""TeaCache's gate against its published rule, at other step counts, and what is known of models."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from toy_loop import ToyModel, ToyPipe, mean, noise, sigmas, skipped

import diffcache
from diffcache.features.fitted import PLAIN_THRESHOLD, FittedAccumulate
from diffcache.features.published import _entries

KNOWN = _entries("teacache")
WAN = KNOWN["wan2.1-t2v-1.3b"]["signals"]
SIGNALS = [(name, signal) for name, entry in KNOWN.items() for signal in entry["signals"]]


def teacache(model, steps, coefficients, threshold, warmup, tail):
    """TeaCache as published (card 2.1) on the toy, whose blocks' input is the latents themselves.

    A negative value of the polynomial counts as 0, where the published code subtracts it.
    """
    x, levels, decisions = noise(1), sigmas(steps), []
    total, previous, rest = 0.0, None, None
    for i, (sigma, after) in enumerate(itertools.pairwise(levels)):
        skip = False
        if warmup <= i < steps - tail:
            moved = mean(x - previous) / mean(previous)
            total += max(0.0, float(np.poly1d(coefficients)(moved)))
            skip = total < threshold
        total, previous, hidden = total if skip else 0.0, x, x
        if not skip:
            for block in model.blocks:
                hidden = block(hidden, sigma)
            rest = hidden - x
        decisions.append(skip)
        x = x + (after - sigma) * model.head(x + rest)
    return x, decisions


@pytest.mark.parametrize(("warmup", "tail"), [(1, 1), (5, 0)])
@pytest.mark.parametrize("threshold", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("coefficients", [(1.0, 0.0), (20.0, 0.5, 0.01), (-30.0, 3.0, -0.02)])
def test_equals_the_published_rule(coefficients, threshold, warmup, tail):
    """The same steps are skipped and the latents are the same; some polynomials are negative."""
    settings = {"warmup_steps": warmup, "tail_steps": tail, "coefficients": coefficients}
    for steps in (12, 30):
        expected, decisions = teacache(ToyModel(), steps, coefficients, threshold, warmup, tail)
        pipe = diffcache.wrap(ToyPipe(), "teacache", threshold=threshold, **settings)
        out = pipe(steps)
        assert skipped(pipe) == decisions and torch.allclose(out, expected, atol=1e-5)
    assert 0 < sum(decisions) < steps


@pytest.mark.parametrize("threshold", [0.05, 0.2])
def test_without_a_polynomial_the_change_itself_is_summed(threshold):
    """As with the polynomial x, and the report says so."""
    pipe = diffcache.wrap(ToyPipe(), "teacache", threshold=threshold)
    out = pipe(30)
    expected, decisions = teacache(ToyModel(), 30, (1.0, 0.0), threshold, 1, 1)
    assert skipped(pipe) == decisions and torch.allclose(out, expected, atol=1e-5)
    notes = " ".join(diffcache.report(pipe).summary["notes"])
    assert "published neither for this model nor this signal" in notes
    assert f"threshold {threshold:g}" in notes


def summed(gate, cell, context, value):
    """What one step adds to the sum."""
    before = cell.numbers.get("accumulated", 0.0)
    gate.reuse(context, value, cell)
    return cell.numbers["accumulated"] - before


@pytest.mark.parametrize("steps", [20, 50, 100])
@pytest.mark.parametrize(("model", "signal"), SIGNALS)
def test_a_longer_run_sums_what_the_fitted_one_does(model, signal, steps, at, cell_of):
    """In n steps of a signal that moves evenly the sum is that of the fitted run's steps."""
    entry = KNOWN[model]
    fitted, coefficients = entry["steps"], entry["signals"][signal]["coefficients"]
    gate = FittedAccumulate(model=model, threshold=math.inf)
    cell = cell_of(probe={"kind": "time_signal", "signal": signal}, metric="previous_l1", gate=gate)
    for moved in (0.01, 0.05, 0.2):  # at each step of the fitted run
        expected = max(0.0, float(np.poly1d(coefficients)(moved)))
        step = summed(gate, cell, at(1, steps), moved * fitted / steps)
        assert step * steps == pytest.approx(expected * fitted, rel=1e-6, abs=1e-9)


def test_the_length_of_the_whole_schedule_counts(at, cell_of):
    """An expert serves some of the steps: the spacing is that of all of them."""
    gate = FittedAccumulate(coefficients=(4.0, 0.0, 0.0), fitted_steps=50, threshold=9.0)
    cell = cell_of(probe="time_signal", metric="previous_l1", gate=gate)
    part = at(1, 12, levels=tuple(1 - i / 25 for i in range(25)))
    assert summed(gate, cell, part, 0.2) == pytest.approx(4 * 0.1**2 * 2)
    assert summed(gate, cell, at(1), 0.2) == pytest.approx(4 * 0.2**2)  # length unknown: as it is


@pytest.mark.parametrize(("model", "signal"), SIGNALS)
def test_published_numbers_are_taken_by_model_and_signal(model, signal, at, cell_of):
    """Polynomial and threshold; what was asked for outright goes before."""
    entry = KNOWN[model]["signals"][signal]
    gate = FittedAccumulate(model=model)
    cell = cell_of(probe={"kind": "time_signal", "signal": signal}, metric="previous_l1", gate=gate)
    assert f"threshold {entry['threshold']:g}" in gate.remark(cell.policy, at(1))
    own = FittedAccumulate(model=model, threshold=0.01, coefficients=(1.0, 0.0))
    assert own.remark(cell.policy, at(1)) is None
    assert summed(own, cell, at(1, 50), 0.25) == 0.25


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


@pytest.mark.parametrize("signal", ["modulation", "embedding"])
def test_no_foreign_polynomial(signal, at, cell_of):
    """FLUX's is fitted to the modulated input, so another signal of it has none."""
    gate = FittedAccumulate(model="flux.1-dev")
    cell = cell_of(probe={"kind": "time_signal", "signal": signal}, metric="previous_l1", gate=gate)
    assert summed(gate, cell, at(1, 28), 0.25) == 0.25
    assert f"threshold {PLAIN_THRESHOLD:g}" in gate.remark(cell.policy, at(1))


@pytest.mark.parametrize(
    ("model", "signal"),
    [("wan2.1-t2v-1.3b", "embedding"), ("flux.1-dev", "input"), ("", "input")],
)
def test_the_signal_is_the_published_one(model, signal):
    """As wrap settles it; a model named outright goes before the one found."""
    assert diffcache.get_policy("teacache").for_model(model).probe.signal == signal
    named = diffcache.get_policy("teacache", **({"model": model} if model else {}))
    assert named.for_model("").probe.signal == signal
    kept = diffcache.get_policy("teacache", signal="modulation").for_model(model)
    assert kept.probe.signal == "modulation" and kept.gate.model == model


def test_the_card_and_the_data_agree():
    """Coefficients of card 2.1, written down there by others."""
    assert WAN["embedding"]["coefficients"] == [
        2396.76752, -1311.10545, 201.331979, -8.29855975, 0.137887774
    ]  # fmt: skip
    assert WAN["modulation"]["coefficients"][0] == -52186.2437
    assert KNOWN["hunyuanvideo"]["signals"]["input"]["threshold"] == 0.15
    assert all(len(KNOWN[m]["signals"][s]["coefficients"]) == 5 for m, s in SIGNALS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": -1}, "threshold must be at least 0, got -1"),
        ({"coefficients": (float("nan"),)}, "coefficients must be one finite number or more"),
        ({"coefficients": ()}, "coefficients must be one finite number or more, got ()"),
        ({"fitted_steps": 0}, "fitted_steps must be at least 1, got 0"),
        ({"model": "wan2.1-t2v-1.3"}, "did you mean 'wan2.1-t2v-1.3b'"),
        ({"signal": "time"}, "signal must be one of embedding, modulation, input, got 'time'"),
    ],
)
def test_settings_are_checked(settings, message):
    """What was expected stands in the message."""
    with pytest.raises(ValueError) as caught:
        diffcache.get_policy("teacache", **settings)
    assert message in str(caught.value)

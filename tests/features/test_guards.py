"""Guards: what forces a full computation, in which order, and their settings."""

from __future__ import annotations

import itertools

import pytest
import torch

from diffcache.features.guards import Guards

FREE = {"warmup_steps": 0, "min_steps": 0}


def filled(cell, at, value=1.0):
    tensor = torch.full((2,), value)
    cell.push(at(0), None, (tensor,), tensor)
    return cell


def test_no_guard_objects(cell_of, at):
    """With history and nothing else set, nothing is forced."""
    guards = Guards(**FREE)
    assert guards.reason(at(1, 20), filled(cell_of(guards=guards), at)) is None


@pytest.mark.parametrize(("num_steps", "short"), [(7, True), (8, False), (None, False)])
def test_short_runs(num_steps, short, cell_of, at):
    """Fewer than min_steps steps are computed in full, and the reason says both numbers."""
    guards = Guards(warmup_steps=0)
    reason = guards.reason(at(1, num_steps), filled(cell_of(guards=guards), at))
    assert reason == ("7 steps are fewer than 8" if short else None)


def test_min_steps_zero_forces_caching(cell_of, at):
    """A two-step run may be cached where the user insists."""
    guards = Guards(**FREE)
    assert guards.reason(at(1, 2), filled(cell_of(guards=guards), at)) is None


@pytest.mark.parametrize("warmup", [0, 1, 3])
@pytest.mark.parametrize("tail", [0, 1, 2])
def test_warmup_and_tail(warmup, tail, cell_of, at):
    """The first `warmup_steps` and the last `tail_steps` of ten are forced, no others."""
    guards = Guards(warmup_steps=warmup, tail_steps=tail, min_steps=0)
    cell = filled(cell_of(guards=guards), at)
    reasons = [guards.reason(at(step, 10), cell) for step in range(10)]
    middle = 10 - warmup - tail
    assert reasons == ["warm-up"] * warmup + [None] * middle + ["tail"] * tail


def test_warmup_counts_the_branch(cell_of, at):
    """A branch that joins late (guidance switched on) has a warm-up of its own."""
    guards = Guards(warmup_steps=2, min_steps=0)
    cell = filled(cell_of(guards=guards), at)
    assert guards.reason(at(6, 10, branch_step=1), cell) == "warm-up"
    assert guards.reason(at(7, 10, branch_step=2), cell) is None


def test_tail_needs_a_known_length(cell_of, at):
    """Without a run length there is no tail."""
    guards = Guards(tail_steps=5, **FREE)
    assert guards.reason(at(9), filled(cell_of(guards=guards), at)) is None


def test_chunk_axis_has_no_step_guards(cell_of, at):
    """On the chunk axis steps are positions: four-step models are cached from chunk to chunk."""
    guards = Guards(warmup_steps=3, tail_steps=3, min_steps=8)
    cell = filled(cell_of(guards=guards, axis="chunk"), at)
    assert guards.reason(at(0, 4, chunk=1), cell) is None


def test_missing_history(cell_of, at):
    """Nothing was computed yet."""
    guards = Guards(**FREE)
    assert guards.reason(at(1, 20), cell_of(guards=guards)) == "no history"


@pytest.mark.parametrize("most", [0, 1, 3])
def test_max_reuses(most, cell_of, at):
    """After `max_reuses` reuses in a row a step is computed."""
    guards = Guards(max_reuses=most, **FREE)
    cell = filled(cell_of(guards=guards), at)
    allowed = 0
    for step in range(1, 10):
        if guards.reason(at(step, 20), cell) is not None:
            break
        cell.predict(at(step), (torch.empty(0),))
        allowed += 1
    assert allowed == most
    assert guards.reason(at(9, 20), cell) == "too many reuses in a row"


def test_max_error_closes_the_loop(cell_of, at):
    """An observed error above the bound forces the next step; a good one lifts it."""
    guards = Guards(max_error=0.2, **FREE)
    cell = filled(cell_of(guards=guards), at)
    for step, value, forced in [(1, 2.0, True), (2, 2.1, False), (3, 3.0, True)]:
        tensor = torch.full((2,), value)
        cell.push(at(step), None, (tensor,), tensor)
        expected = "observed error" if forced else None
        assert guards.reason(at(step + 1, 20), cell) == expected


def test_guards_only_force(cell_of, at):
    """Whatever the guards, a gate that computes is never turned round."""
    settings = itertools.product([0, 2], [0, 2], [None, 0, 2], [0, 8], [None, 0.1])
    for warmup, tail, reuses, least, error in settings:
        guards = Guards(
            warmup_steps=warmup,
            tail_steps=tail,
            max_reuses=reuses,
            min_steps=least,
            max_error=error,
        )
        cell = filled(cell_of(guards=guards, gate={"kind": "interval", "interval": 1}), at)
        assert not any(cell.decide(at(step, 10), None).reuse for step in range(10))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"tail_steps": -2}, "tail_steps must be at least 0, got -2"),
        ({"min_steps": -1}, "min_steps must be at least 0, got -1"),
        ({"max_reuses": -1}, "max_reuses must be at least 0, got -1"),
        ({"max_error": -0.1}, "max_error must be at least 0, got -0.1"),
        ({"max_error": float("nan")}, "max_error must be at least 0, got nan"),
        ({"warmup_steps": float("nan")}, "warmup_steps must be at least 0, got nan"),
    ],
)
def test_settings_are_checked(settings, message):
    """The message names the setting, the bounds and what was given."""
    with pytest.raises(ValueError) as caught:
        Guards(**settings)
    assert str(caught.value) == message

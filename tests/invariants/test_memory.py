"""Bytes: counted as they are, never above the promise, all given back."""

from __future__ import annotations

import pytest
import torch

import diffcache
from diffcache.features.store import TensorStore

TIMES = torch.linspace(1000, 400, 12)
LATENT = 4 * 2 * 8 * 8 * 4  # bytes of the tiny model's output in fp32
pytestmark = pytest.mark.filterwarnings("ignore::diffcache.DiffcacheWarning")


@pytest.mark.peer_row(18)
def test_bytes_held_is_what_is_alive(policy, tiny_wan, run, ledgers, bytes_alive):
    """At every call the ledger equals the storages that our state reaches, to the byte."""
    pipe, seen = diffcache.wrap(tiny_wan(), policy), []
    (state,) = ledgers(pipe)

    def check(module, args, output):
        seen.append((state.store.bytes_held, bytes_alive(state)))

    pipe.transformer.register_forward_hook(check)
    run(pipe)
    assert len(seen) == 18 and max(held for held, _ in seen) > 0
    assert all(held == alive for held, alive in seen), seen
    assert diffcache.report(pipe).summary["bytes_peak"] >= max(held for held, _ in seen)


@pytest.fixture
def watched(monkeypatch):
    """Every value that any ledger takes, as it takes it."""
    seen = []
    put = TensorStore.put

    def spy(self, *args, **kwargs):
        held = put(self, *args, **kwargs)
        seen.append((self.bytes_held, self.settings.max_bytes))
        return held

    monkeypatch.setattr(TensorStore, "put", spy)
    return seen


@pytest.mark.peer_row(18)
@pytest.mark.parametrize("max_bytes", [0, 1000, LATENT, 2 * LATENT, 5 * LATENT, 40 * LATENT])
def test_max_bytes_is_never_exceeded(policy, tiny_wan, run, watched, plain, max_bytes, reused):
    """At no moment, whatever the bound; a bound that is too small computes."""
    pipe = diffcache.wrap(tiny_wan(), policy, max_bytes=max_bytes)
    out = run(pipe)
    assert watched and all(held <= limit for held, limit in watched)
    assert torch.isfinite(out).all()
    assert diffcache.report(pipe).summary["bytes_peak"] <= max_bytes
    if max_bytes < LATENT:
        assert torch.equal(out, plain()) and reused(pipe) == 0


def test_too_small_a_bound_is_said(policy, tiny_wan, run, skips):
    """The report names max_bytes."""
    pipe = diffcache.wrap(tiny_wan(), policy, max_bytes=100)
    run(pipe)
    notes = " ".join(diffcache.report(pipe).summary["notes"])
    assert ("max_bytes" in notes) or not skips(policy)


@pytest.mark.peer_row(19)
def test_zero_bytes_after_the_call(policy, tiny_wan, run, ledgers, bytes_alive):
    """After each run, reset and unwrap."""
    pipe = diffcache.wrap(tiny_wan(), policy)
    (state,) = ledgers(pipe)
    run(pipe)
    assert state.store.bytes_held == bytes_alive(state) == 0
    for free in (diffcache.reset, diffcache.unwrap):
        with pytest.raises(ZeroDivisionError):
            run(pipe, callback_on_step_end=cancel_at(5))
        assert state.store.bytes_held > 0
        free(pipe)
        assert state.store.bytes_held == bytes_alive(state) == 0


def cancel_at(step):
    def callback(pipe, index, t, tensors):
        1 / (index - step)
        return tensors

    return callback


def test_freed_with_the_last_timestep(policy, tiny_wan, run, ledgers):
    """Where maybe_free_model_hooks is never reached: after the last step nothing is held."""
    pipe = diffcache.wrap(tiny_wan(), policy)
    (state,) = ledgers(pipe)
    with pytest.raises(ZeroDivisionError):
        run(pipe, callback_on_step_end=cancel_at(8))
    assert state.store.bytes_held == 0


def test_freed_after_an_interrupted_run(policy, tiny_wan, run, ledgers):
    """The user's interrupt ends the run early but in order: maybe_free_model_hooks frees."""

    def interrupt(pipe, index, t, tensors):
        pipe._interrupt = index == 5
        return tensors

    pipe = diffcache.wrap(tiny_wan(), policy)
    (state,) = ledgers(pipe)
    run(pipe, callback_on_step_end=interrupt)
    assert diffcache.report(pipe).summary["steps"] == 6 and state.store.bytes_held == 0


def test_freed_in_an_own_loop(policy, tiny_wan, loop, ledgers, decisions):
    """The same in a loop of one's own over the pipeline's scheduler."""
    pipe = diffcache.wrap(tiny_wan(), policy)
    (state,) = ledgers(pipe)
    held = []
    pipe.scheduler.set_timesteps(12)
    loop(
        pipe.transformer,
        pipe.scheduler.timesteps,
        each=lambda step, tensors: held.append(state.store.bytes_held),
    )
    assert held[5] > 0 and held[-1] == 0 and len(decisions(pipe)) == 12


def test_what_a_cancelled_run_left_goes_at_the_next_call(policy, tiny_wan, run, ledgers):
    """The first call of the next run does not add to it."""
    pipe, seen = diffcache.wrap(tiny_wan(), policy), []
    (state,) = ledgers(pipe)
    run(pipe)
    peak = state.store.bytes_peak
    with pytest.raises(ZeroDivisionError):
        run(pipe, callback_on_step_end=cancel_at(5))

    def look(pipe, index, t, tensors):
        seen.append(state.store.bytes_held)
        return tensors

    run(pipe, callback_on_step_end=look)
    assert state.store.bytes_peak == peak and seen[-1] == 0


def test_a_bare_module_stays_within_its_bound(policy, tiny_wan, loop, watched):
    """No scheduler tells it when to free: it keeps at most max_bytes, run after run."""
    module = diffcache.wrap(tiny_wan().transformer, policy, max_bytes=20 * LATENT)
    first = loop(module, TIMES)
    held = diffcache.report(module).summary["bytes_held"]
    for _ in range(3):
        assert all(map(torch.equal, loop(module, TIMES), first))
        assert diffcache.report(module).summary["bytes_held"] == held
    assert 0 < held <= 20 * LATENT and all(now <= limit for now, limit in watched)
    diffcache.reset(module)
    assert diffcache.report(module).summary["bytes_held"] == 0


@pytest.mark.peer_row(18)
@pytest.mark.parametrize("store", [{"dtype": "bfloat16"}, {"device": "cpu"}])
def test_other_stores_are_counted_too(policy, tiny_wan, loop, ledgers, bytes_alive, store):
    """bf16 and CPU stores: counted to the byte; outputs keep dtype and device."""
    module = diffcache.wrap(tiny_wan().transformer, policy, **store)
    (state,) = ledgers(module)
    seen = []

    def look(step, tensors):
        seen.append(state.store.bytes_held == bytes_alive(state))

    outputs = loop(module, TIMES, each=look)
    assert all(seen) and {out.dtype for out in outputs} == {torch.float32}

"""A cell: history, budget, held copies, and the order of its stages."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from diffcache.features.predictors import Polynomial
from diffcache.features.store import Store

PROBED = {"probe": "site_input", "metric": "relative_l1", "gate": "threshold"}


def push(cell, context, value, fingerprint=None):
    """Pushes one single-stream output."""
    return cell.push(context, fingerprint, (value,), value)


def test_predict_continues_a_line(cell_of, at):
    """Two computed steps and order 1 continue a straight line in every stream."""
    cell = cell_of(predictor=Polynomial(order=1))
    for step in (0, 2):
        streams = (torch.full((3,), float(step)), torch.full((2, 2), -2.0 * step))
        cell.push(at(step), None, streams, streams[0])
    like = (torch.empty(0), torch.empty(0))
    image, text = cell.predict(at(5), like)
    assert torch.allclose(image, torch.full((3,), 5.0))
    assert torch.allclose(text, torch.full((2, 2), -10.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_hold_is_an_exact_copy(dtype, cell_of, at):
    """Bit-identical, in the model's dtype, and not the stored tensor itself."""
    cell = cell_of()
    value = torch.randn(5, dtype=torch.float64).to(dtype)
    push(cell, at(0), value.clone())
    for _ in range(2):
        (held,) = cell.predict(at(1), (value,))
        assert torch.equal(held, value) and held.dtype == dtype
        held.zero_()


def test_history_survives_what_the_model_does(cell_of, at):
    """A model that writes into its output afterwards does not change the history."""
    cell, value = cell_of(), torch.ones(3)
    push(cell, at(0), value)
    value.zero_()
    assert torch.equal(cell.predict(at(1), (value,))[0], torch.ones(3))


def test_depth_bounds_the_history(cell_of, at):
    """Order 2 keeps three steps, the newest."""
    cell = cell_of(predictor=Polynomial(order=2))
    for step in range(6):
        push(cell, at(step), torch.full((4,), float(step)))
    assert [entry.time for entry in cell.history] == [-3.0, -4.0, -5.0]
    assert cell.store.bytes_held == 3 * 16 and cell.store.bytes_peak == 3 * 16


def test_equal_time_replaces(cell_of, at):
    """A second call at the same time (Heun) replaces the first: no division by zero."""
    cell = cell_of(predictor=Polynomial(order=1))
    for step, value in [(0, 1.0), (1, 2.0), (1, 3.0)]:
        push(cell, at(step), torch.full((2,), value))
    assert [entry.time for entry in cell.history] == [0.0, -1.0]
    (out,) = cell.predict(at(2), (torch.empty(0),))
    assert torch.allclose(out, torch.full((2,), 5.0)) and cell.store.bytes_held == 16


@pytest.mark.parametrize("max_bytes", [0, 15, 16, 40, 48, 100])
def test_budget_shortens_the_history(max_bytes, cell_of, at):
    """As many steps as fit are kept, at most three, and the peak stays within the budget."""
    cell = cell_of(predictor=Polynomial(order=2), store=Store(max_bytes=max_bytes))
    for step in range(5):
        push(cell, at(step), torch.full((4,), float(step)))
    assert len(cell.history) == min(3, max_bytes // 16)
    assert cell.store.bytes_peak <= max_bytes
    if cell.history:
        assert cell.history[-1].time == -4.0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("max_bytes", [None, 300])
def test_bytes_match_what_is_alive(seed, dtype, max_bytes, cell_of, at):
    """The ledger equals all tensors of more than one element that the cell keeps alive."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    store = Store(dtype=dtype, max_bytes=max_bytes)
    cell = cell_of(predictor=Polynomial(order=2), store=store, **PROBED)
    for step in range(12):
        value = torch.randn(rng.choice([20, 20, 20, 30]), generator=generator)
        if any(entry.tensors[0].shape != value.shape for entry in cell.history):
            cell.clear()
        if cell.decide(at(step), value).reuse:
            cell.predict(at(step), (value,))
        else:
            push(cell, at(step), value, value)
        assert cell.store.bytes_held == alive_bytes(cell)
        assert max_bytes is None or cell.store.bytes_held <= max_bytes
    cell.clear()
    assert cell.store.bytes_held == 0 == alive_bytes(cell)


def alive_bytes(cell):
    """Bytes of the tensors reachable from a cell, each storage once; scalars are bookkeeping."""
    storages, todo, seen = {}, [cell.history, cell.numbers, *attributes(cell)], set()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if item.numel() > 1:
                storage = item.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, (list, tuple, dict)) or type(item).__name__ == "Entry":
            todo += gc.get_referents(item)
    return sum(storages.values())


def attributes(cell):
    return [value for name, value in vars(cell).items() if name not in ("policy", "store")]


def test_error_is_the_relative_l1_of_the_prediction(cell_of, at):
    """By hand: held [1, 1], truth [2, 4]: (1 + 3) / (2 + 4)."""
    cell = cell_of()
    assert push(cell, at(0), torch.tensor([1.0, 1.0])) is None
    assert push(cell, at(1), torch.tensor([2.0, 4.0])) == pytest.approx(4 / 6)


def test_error_of_an_exact_prediction_is_zero(cell_of, at):
    """A straight line under order 1 is foretold without error."""
    cell = cell_of(predictor=Polynomial(order=1))
    errors = [push(cell, at(step), torch.full((3,), 1.0 + step)) for step in range(4)]
    assert errors[0] is None and errors[1] > 0.1
    assert errors[2:] == pytest.approx([0.0, 0.0], abs=1e-6)


def test_large_tensors_are_sampled_evenly(cell_of, at):
    """The error of a tensor of 100 000 elements is near the whole tensor's."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 100_000, generator=generator)
    cell = cell_of()
    push(cell, at(0), a)
    expected = float((a - b).abs().mean() / b.abs().mean())
    assert push(cell, at(1), b) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_metric_computes(bad, cell_of, at):
    """A fingerprint with NaN or infinity computes, and says so."""
    cell = cell_of(**PROBED)
    push(cell, at(0), torch.ones(4), torch.ones(4))
    decision = cell.decide(at(1), torch.tensor([1.0, bad, 1.0, 1.0]))
    assert not decision.reuse and decision.reason == "non-finite metric"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_history_computes(bad, cell_of, at):
    """A computed step with NaN or infinity in it is never the base of a reuse; the next one is."""
    cell = cell_of()
    push(cell, at(0), torch.tensor([1.0, bad]))
    assert not cell.decide(at(1), None).reuse
    push(cell, at(1), torch.ones(2))
    assert cell.decide(at(2), None).reuse


def test_non_finite_second_stream_computes(cell_of, at):
    """The same for the text stream of a two-stream site."""
    cell = cell_of()
    streams = (torch.ones(2), torch.tensor([1.0, float("nan")]))
    cell.push(at(0), None, streams, streams[0])
    assert not cell.decide(at(1), None).reuse


def test_older_non_finite_step_computes(cell_of, at):
    """With order 1 the step before the newest has weight, so it must be finite too."""
    cell = cell_of(predictor=Polynomial(order=1))
    push(cell, at(0), torch.tensor([1.0, float("nan")]))
    push(cell, at(1), torch.ones(2))
    if cell.decide(at(2), None).reuse:
        assert torch.isfinite(cell.predict(at(2), (torch.empty(0),))[0]).all()


def test_overflow_in_the_store_computes(cell_of, at):
    """1e5 is infinite in float16: what is held, not what was given, must be finite."""
    cell = cell_of(store=Store(dtype="float16"))
    push(cell, at(0), torch.tensor([1.0, 1e5]))
    if cell.decide(at(1), None).reuse:
        assert torch.isfinite(cell.predict(at(1), (torch.empty(0),))[0]).all()


def test_changed_shape_of_the_fingerprint_computes(cell_of, at):
    """Nothing is compared across shapes."""
    cell = cell_of(**PROBED)
    push(cell, at(0), torch.ones(4), torch.ones(4))
    assert not cell.decide(at(1), torch.ones(5)).reuse


def test_guard_outranks_gate_but_metric_is_recorded(cell_of, at):
    """During warm-up the metric is measured and reported, the decision is the guard's."""
    guards = {"kind": "guards", "warmup_steps": 3, "min_steps": 0}
    cell = cell_of(guards=guards, **PROBED)
    push(cell, at(0), torch.ones(4), torch.ones(4))
    decision = cell.decide(at(1), torch.ones(4))
    assert (decision.reuse, decision.reason, decision.metric) == (False, "warm-up", 0.0)


def test_decide_counts_nothing(cell_of, at):
    """Counters move at predict and push alone."""
    cell = cell_of()
    push(cell, at(0), torch.ones(2))
    for _ in range(3):
        cell.decide(at(1), None)
    assert (cell.computed, cell.reused, cell.reuses_in_a_row) == (1, 0, 0)
    cell.predict(at(1), (torch.empty(0),))
    assert (cell.computed, cell.reused, cell.reuses_in_a_row) == (1, 1, 1)
    push(cell, at(2), torch.ones(2))
    assert (cell.computed, cell.reused, cell.reuses_in_a_row) == (2, 1, 0)


def test_clear_forgets_everything(cell_of, at):
    """A cleared cell equals a new one."""
    cell = cell_of(**PROBED)
    push(cell, at(0), torch.ones(4), torch.ones(4))
    cell.clear()
    assert cell.store.bytes_held == 0 and not cell.history and not cell.numbers
    assert cell.decide(at(1), torch.ones(4)).reason == "no history"

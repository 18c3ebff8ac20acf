"""Measuring on a pipeline leaves its wrapping as it was: policies, strictness, hooks."""

from __future__ import annotations

import pytest
import torch
from tiny_pipelines import embeddings, two_experts

import diffcache
from diffcache.calibrate import calibrate, record
from diffcache.magnitudes import measure

STEPS = 16


def run(pipe):
    return pipe(
        height=64,
        width=64,
        num_frames=5,
        num_inference_steps=STEPS,
        guidance_scale=3.0,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
        **embeddings(),
    ).frames


def recorded(pipe):
    record(pipe, [lambda: run(pipe)])


def calibrated(pipe):
    calibrate(pipe, [lambda: run(pipe)], fraction=0.7, error_weights=(0.0,), worst=(2.0,))


def measured(pipe):
    measure(pipe, lambda: run(pipe))


def stopped(pipe):
    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(pipe, fail)


ALL = pytest.mark.parametrize("work", [recorded, calibrated, measured, stopped])


@ALL
def test_a_strict_pipeline_stays_strict(work) -> None:
    """A run that skips nothing raised before, and raises after."""
    pipe = diffcache.wrap(two_experts(), "hold", min_steps=99, strict=True)
    work(pipe)
    with pytest.raises(diffcache.DiffcacheError, match="skipped nothing"):
        run(pipe)


@ALL
def test_an_exchanged_expert_of_a_strict_pipeline_still_raises(work) -> None:
    pipe = diffcache.wrap(two_experts(), "hold", strict=True)
    work(pipe)
    pipe.transformer_2 = two_experts().transformer_2
    with pytest.raises(diffcache.DiffcacheError, match="transformer_2 was exchanged"):
        run(pipe)


@ALL
def test_an_expert_that_was_not_wrapped_is_not_wrapped_after(work) -> None:
    """One expert wrapped by name: the other keeps no hook, and is not in the report."""
    pipe, twin = (diffcache.wrap(two_experts(), {"transformer_2": "hold"}) for _ in range(2))
    expected = run(twin)
    work(pipe)
    assert torch.equal(run(pipe), expected)
    assert {row.module for row in diffcache.report(pipe).rows} == {"transformer_2"}
    assert set(pipe.transformer.__dict__) == set(twin.transformer.__dict__)


@ALL
def test_a_module_wrapped_by_itself_leaves_its_pipeline_plain(work) -> None:
    pipe, twin = two_experts(), two_experts()
    for each in (pipe, twin):
        diffcache.wrap(each.transformer, "hold", fraction=0.5)
    expected = run(twin)
    work(pipe)
    assert torch.equal(run(pipe), expected)
    assert set(pipe.__dict__) == set(twin.__dict__)


@ALL
def test_each_expert_keeps_its_own_policy(work) -> None:
    policies = {"transformer": "hold", "transformer_2": "taylorseer"}
    pipe = diffcache.wrap(two_experts(), policies)
    work(pipe)
    run(pipe)
    modules = diffcache.report(pipe).summary["modules"]
    assert {name: module["policy"] for name, module in modules.items()} == policies

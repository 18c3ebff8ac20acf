"""Bytes: told before and after, bounded, given back."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import pytest
import torch
from toys import lively, reused

import diffcache


@pytest.mark.peer_row(18)
@pytest.mark.peer_row(19)
def test_memory_is_told_bounded_and_given_back(tiny_wan, run_tiny):
    """WanVideoWrapper #341: out of memory once the cache was on; diffusers PR #13497: never freed.

    One latent for each branch is what `hold` needs; bf16 halves it; a bound holds.
    """
    latent = 4 * 2 * 8 * 8 * 4
    for settings, peak in (({}, 2 * latent), ({"dtype": "bfloat16"}, latent)):
        pipe = diffcache.wrap(tiny_wan(), "hold", **settings)
        run_tiny(pipe)
        summary = diffcache.report(pipe).summary
        assert summary["bytes_peak"] == peak and summary["bytes_held"] == 0
    pipe = diffcache.wrap(tiny_wan(), "hold", max_bytes=latent)
    run_tiny(pipe)
    assert diffcache.report(pipe).summary["bytes_peak"] == latent and reused(pipe) > 0


@pytest.mark.peer_row(18)
@pytest.mark.parametrize("name", ["hold", "easycache", "first_block", "taylorseer", "balanced"])
def test_max_bytes_holds_whatever_is_asked(name, tiny_wan, run_tiny):
    """TaylorSeer #5: one model's history took 77 GB. A bound is never passed, and shrinks it."""
    free = diffcache.wrap(tiny_wan(), lively(name))
    run_tiny(free)
    peak = diffcache.report(free).summary["bytes_peak"]
    assert peak > 0
    for bound in (peak, peak // 2, peak // 4, 0):
        pipe = diffcache.wrap(tiny_wan(), lively(name), max_bytes=bound)
        out = run_tiny(pipe)
        assert diffcache.report(pipe).summary["bytes_peak"] <= bound
    assert torch.equal(out, run_tiny(tiny_wan()))  # nothing can be kept: nothing is skipped
    assert "max_bytes=0" in str(diffcache.report(pipe))


@pytest.mark.peer_row(18)
@pytest.mark.parametrize("name", ["hold", "easycache", "first_block", "taylorseer", "balanced"])
def test_the_history_may_lie_on_the_host(name, tiny_wan, run_tiny):
    """`device="cpu"` is where it lies, and the outputs are those of a history beside the model."""
    expected = run_tiny(diffcache.wrap(tiny_wan(), lively(name)))
    pipe = diffcache.wrap(tiny_wan(), lively(name), device="cpu")
    assert torch.equal(run_tiny(pipe), expected) and reused(pipe) > 0
    with pytest.raises(ValueError, match="device"):
        diffcache.wrap(tiny_wan(), lively(name), device="gpu")


@pytest.mark.peer_row(19)
@pytest.mark.parametrize("end", ["returns", "raises", "is interrupted"])
def test_zero_bytes_after_the_call(end, tiny_wan, run_tiny):
    """diffusers PR #13497: memory was kept after the run.

    Nothing of ours is alive after a run that returned. What a run that raised left behind goes with
    the next run, at reset or unwrap, or with the pipeline.
    """

    def stop(pipe, index, t, tensors):
        if index == 6 and end == "raises":
            raise InterruptedError
        pipe._interrupt = index >= 6 and end == "is interrupted"
        return tensors

    pipe = diffcache.wrap(tiny_wan(), "taylorseer")
    run_tiny(pipe)
    before = tensors_alive()
    with pytest.raises(InterruptedError) if end == "raises" else nullcontext():
        run_tiny(pipe, callback_on_step_end=stop)
    held = diffcache.report(pipe).summary["bytes_held"]
    assert (held > 0) == (end == "raises")
    diffcache.reset(pipe)
    assert diffcache.report(pipe).summary["bytes_held"] == 0
    assert tensors_alive() <= before


def tensors_alive():
    """How many tensors there are in this process, but for parameters."""
    gc.collect()
    found = [item for item in gc.get_objects() if type(item) is torch.Tensor]
    return len(found)

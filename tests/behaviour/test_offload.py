"""Offload before and after wrap: the cache is no hindrance to it, and none is lost by it."""

from __future__ import annotations

import pytest
import torch
from accelerate import cpu_offload
from toys import apart, lively, reused

import diffcache

CPU = torch.device("cpu")


def by_model(pipe):
    pipe.enable_model_cpu_offload(device="cpu")


def by_layer(pipe):
    """As enable_sequential_cpu_offload: each layer's weights come when it runs, and go again."""
    cpu_offload(pipe.transformer, execution_device=CPU)


def by_group(pipe):
    pipe.transformer.enable_group_offload(
        CPU, CPU, offload_type="block_level", num_blocks_per_group=1
    )


def by_leaf(pipe):
    pipe.transformer.enable_group_offload(CPU, CPU, offload_type="leaf_level")


OFFLOADS = {"model": by_model, "sequential": by_layer, "group": by_group, "leaf": by_leaf}


@pytest.mark.peer_row(17)
@pytest.mark.parametrize("first", ["wrap", "offload"])
@pytest.mark.parametrize("kind", OFFLOADS)
@pytest.mark.parametrize("name", ["hold", "first_block", "balanced"])
def test_offload_in_either_order(name, kind, first, tiny_wan, run_tiny):
    """cache-dit #443: group or CPU offload broke the cache, or was skipped by it.

    vllm-omni #1710 and DeepCache #50 alike. Here: model, sequential and group offload before and
    after wrap give what the policy gives without; twice; after unwrap the offload works on.
    """
    expected = run_tiny(diffcache.wrap(tiny_wan(), lively(name)))
    pipe = tiny_wan()
    if first == "wrap":
        diffcache.wrap(pipe, lively(name))
    OFFLOADS[kind](pipe)
    if first == "offload":
        diffcache.wrap(pipe, lively(name))
    for _ in range(2):
        assert torch.equal(run_tiny(pipe), expected)
        assert reused(pipe) > 0 and diffcache.report(pipe).summary["bytes_held"] == 0
    diffcache.unwrap(pipe)
    assert torch.equal(run_tiny(pipe), run_tiny(tiny_wan()))


@pytest.mark.peer_row(17)
@pytest.mark.parametrize("kind", OFFLOADS)
def test_offload_between_two_runs(kind, tiny_wan, run_tiny):
    """Wrapped, run, then offloaded: the next run skips the same steps."""
    pipe = diffcache.wrap(tiny_wan(), "hold")
    expected, count = run_tiny(pipe), reused(pipe)
    OFFLOADS[kind](pipe)
    assert torch.equal(run_tiny(pipe), expected) and reused(pipe) == count > 0


@pytest.mark.peer_row(17)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("store", [{}, {"device": "cpu"}])
@pytest.mark.parametrize("kind", ["none", "model", "sequential", "group"])
def test_offload_from_a_gpu(kind, store, tiny_wan, run_tiny):
    """What is kept is brought to where the model computes, from the host too."""
    expected = run_tiny(diffcache.wrap(tiny_wan(), "hold"))
    pipe = diffcache.wrap(tiny_wan(), "hold", **store)
    if kind == "none":
        pipe.to("cuda")
    elif kind == "group":
        pipe.transformer.enable_group_offload(
            torch.device("cuda"), CPU, offload_type="block_level", num_blocks_per_group=1
        )
    elif kind == "model":
        pipe.enable_model_cpu_offload()
    else:
        pipe.enable_sequential_cpu_offload()
    found = run_tiny(pipe)
    assert found.is_cuda and reused(pipe) > 0
    assert apart(found.cpu(), expected) < 1e-3

"""Blocks under torch.compile: no more graphs and no more breaks than without us."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from toys import lively, reused

import diffcache


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def counted(run, *pipes):
    """Graphs, breaks and recompilations while the pipelines run one after the other."""
    torch._dynamo.reset()
    counters.clear()
    outputs = [run(pipe) for pipe in pipes]
    recompiled = sum(counters["recompiles"].values())
    return (
        counters["stats"]["unique_graphs"],
        sum(counters["graph_break"].values()),
        recompiled,
    ), outputs


def blocks_compiled(pipe):
    pipe.transformer.compile_repeated_blocks(backend="eager")
    return pipe


@pytest.mark.peer_row(16)
@pytest.mark.parametrize(
    ("site", "first"),
    [
        ("stack", "wrap"),
        ("stack", "compile"),
        ("block", "wrap"),
        ("span", "compile"),
        ("model", "wrap"),
    ],
)
def test_compile_repeated_blocks(site, first, tiny_wan, run_tiny):
    """cache-dit #76: slower under compile than without the cache, for a graph break in each step.

    A run that mixes computed and skipped steps needs the graphs of a plain run, and has no break.
    """
    policy = lively("hold", site=site)
    expected = run_tiny(diffcache.wrap(tiny_wan(), policy))
    without, _ = counted(run_tiny, blocks_compiled(tiny_wan()))
    pipe = tiny_wan()
    if first == "wrap":
        blocks_compiled(diffcache.wrap(pipe, policy))
    else:
        diffcache.wrap(blocks_compiled(pipe), policy)
    found, (output,) = counted(run_tiny, pipe)
    assert found == without and without[0] >= 1 and without[1] == 0
    assert torch.equal(output, expected) and reused(pipe) > 0


@pytest.mark.peer_row(16)
@pytest.mark.parametrize("name", ["first_block", "easycache", "taylorseer", "balanced"])
def test_a_second_run_compiles_nothing(name, tiny_wan, run_tiny):
    """Policies that measure: twice the same run, and the graphs of one."""
    without, _ = counted(run_tiny, blocks_compiled(tiny_wan()))
    pipe = diffcache.wrap(blocks_compiled(tiny_wan()), lively(name))
    found, (one, two) = counted(run_tiny, pipe, pipe)
    assert found == without and torch.equal(one, two) and reused(pipe) > 0


@pytest.mark.peer_row(16)
def test_unwrapped_blocks_stay_compiled(tiny_wan, run_tiny):
    """After unwrap the blocks' graphs are still good: nothing is compiled again."""
    pipe = diffcache.wrap(blocks_compiled(tiny_wan()), "hold", site="stack")
    without, (plain,) = counted(run_tiny, blocks_compiled(tiny_wan()))
    torch._dynamo.reset()
    counters.clear()
    run_tiny(pipe)
    diffcache.unwrap(pipe)
    assert torch.equal(run_tiny(pipe), plain)
    assert counters["stats"]["unique_graphs"] == without[0]


class Int8(nn.Module):
    """A linear layer with 8-bit weights and one scale for each row."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.abs().amax(1, keepdim=True) / 127 + 1e-12
        self.register_buffer("weight_int8", (linear.weight / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.detach())
        self.bias = linear.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight_int8.to(x.dtype) * self.scale, self.bias)


def quantized(pipe):
    """All linear layers in the feed-forward parts of the blocks in 8 bits."""
    for block in pipe.transformer.blocks:
        for parent in list(block.ffn.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Int8(child))
    return pipe


def cast(pipe):
    pipe.transformer.enable_layerwise_casting(
        storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32
    )
    return pipe


@pytest.mark.peer_row(15)
@pytest.mark.parametrize(
    ("make", "site"),
    [
        (quantized, "stack"),
        (quantized, "model"),
        pytest.param(cast, "stack", marks=pytest.mark.slow),  # traces itself again and again
    ],
)
def test_quantized_weights_under_compiled_blocks(make, site, tiny_wan, run_tiny):
    """cache-dit #1089: the cache, quantized weights and compile failed together.

    The order is: quantize, compile the blocks, wrap. No graph more than without us, the decisions
    and the outputs of the run that is not compiled.
    """
    policy, run = lively("hold", site=site), partial(run_tiny, steps=9, guidance=1.0)
    expected = run(diffcache.wrap(make(tiny_wan()), policy))
    without, _ = counted(run, blocks_compiled(make(tiny_wan())))
    pipe = diffcache.wrap(blocks_compiled(make(tiny_wan())), policy)
    found, (output,) = counted(run, pipe)
    assert found == without and reused(pipe) > 0
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)


@pytest.mark.peer_row(15)
def test_a_model_compiled_whole_says_what_to_do(tiny_wan):
    """Blocks inside one graph cannot be skipped: the message names the two ways out."""
    pipe = tiny_wan()
    pipe.transformer.compile(backend="eager")
    with pytest.raises(ValueError, match=r"site='model'.*compile_repeated_blocks"):
        diffcache.wrap(pipe, "first_block")

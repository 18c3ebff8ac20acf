"""torch.compile around, below and beside us; graphs are counted with the eager backend."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import diffcache


class Block(nn.Module):
    """h + tanh(W h)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden_states):
        return hidden_states + torch.tanh(self.linear(hidden_states))


class Denoiser(nn.Module):
    """Four blocks and a time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.requires_grad_(False)

    def forward(self, hidden_states, timestep):
        hidden_states = hidden_states + timestep / 1000
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def run(module, steps=12):
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    times = torch.linspace(1000, 450, steps)
    return torch.stack([module(x * (1 + 0.1 * i), times[i]) for i in range(steps)])


def graphs_and_breaks():
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def counted(make):
    """Graphs, breaks and outputs of one way to compile, from a clean start."""
    torch._dynamo.reset()
    counters.clear()
    output = run(make())
    return graphs_and_breaks(), output


def reused(module):
    return sum(row.decision == "reuse" for row in diffcache.report(module).rows)


def compiled_blocks(module):
    for block in module.blocks:
        block.compile(backend="eager")
    return module


@pytest.mark.peer_row(16)
@pytest.mark.parametrize("first", ["wrap", "compile"])
@pytest.mark.parametrize("site", ["stack", "block", "model"])
def test_compiled_blocks(site, first):
    """Each block compiled alone, before or after wrap: as many graphs and breaks as without us."""
    plain, _ = counted(lambda: compiled_blocks(Denoiser()))
    expected = run(diffcache.wrap(Denoiser(), "hold", site=site))

    def make():
        module = Denoiser()
        if first == "compile":
            compiled_blocks(module)
        module = diffcache.wrap(module, "hold", site=site)
        return compiled_blocks(module) if first == "wrap" else module

    found, output = counted(make)
    assert found == plain and plain[0] >= 1 and plain[1] == 0
    assert torch.equal(output, expected)


@pytest.mark.parametrize("first", ["wrap", "compile"])
def test_module_compile_under_a_model_site(first):
    """module.compile(): the forward below is one graph without breaks, and steps are skipped."""

    def plain():
        module = Denoiser()
        module.compile(backend="eager")
        return module

    without, _ = counted(plain)
    expected = run(diffcache.wrap(Denoiser(), "hold"))
    module = Denoiser()

    def make():
        if first == "compile":
            module.compile(backend="eager")
        diffcache.wrap(module, "hold")
        if first == "wrap":
            module.compile(backend="eager")
        return module

    found, output = counted(make)
    assert torch.equal(output, expected)
    assert found == without and without[1] == 0
    assert reused(module) == 4
    diffcache.unwrap(module)
    assert torch.equal(run(module), run(Denoiser()))


def test_wrapping_what_torch_compile_returns():
    """torch.compile(module), then wrap: the compiled module is called on computed steps alone."""
    without, _ = counted(lambda: torch.compile(Denoiser(), backend="eager"))
    module = diffcache.wrap(torch.compile(Denoiser(), backend="eager"), "hold")
    found, output = counted(lambda: module)
    assert torch.equal(output, run(diffcache.wrap(Denoiser(), "hold")))
    assert reused(module) == 4 and found == without
    diffcache.unwrap(module)
    assert torch.equal(run(module), run(Denoiser()))


def test_compiling_a_wrapped_module():
    """wrap, then torch.compile around it: the plain forward in as many graphs as without us."""
    without, full = counted(lambda: torch.compile(Denoiser(), backend="eager"))
    module = diffcache.wrap(Denoiser(), "hold")
    found, output = counted(lambda: torch.compile(module, backend="eager"))
    assert found == without and torch.allclose(output, full)
    diffcache.unwrap(module)
    assert torch.allclose(run(torch.compile(module, backend="eager")), full)


@pytest.mark.parametrize("how", ["module", "function"])
def test_stack_site_refuses_one_compiled_graph(how):
    """Blocks inside one graph cannot be skipped: refused at once, with what to do."""
    module = Denoiser()
    if how == "module":
        module.compile(backend="eager")
    else:
        module = torch.compile(module, backend="eager")
    with pytest.raises(ValueError, match="site='model'"):
        diffcache.wrap(module, "hold", site="stack")
    assert torch.equal(run(module), run(Denoiser()))


def test_stack_site_refuses_to_be_compiled_later():
    """The same when module.compile() comes after wrap."""
    module = diffcache.wrap(Denoiser(), "hold", site="stack")
    with pytest.raises((ValueError, RuntimeError), match="site='model'"):
        module.compile(backend="eager")
    run(module)
    assert reused(module) == 4


@pytest.mark.parametrize("first", ["wrap", "compile"])
def test_unwrap_after_module_compile(first):
    """What torch put into the dictionary stays as torch would have it."""
    module, twin = Denoiser(), Denoiser()
    twin.compile(backend="eager")
    if first == "compile":
        module.compile(backend="eager")
    diffcache.wrap(module, "hold")
    if first == "wrap":
        module.compile(backend="eager")
    run(module)
    diffcache.unwrap(module)
    assert module.__dict__.keys() == twin.__dict__.keys()
    assert torch.equal(run(module), run(twin))

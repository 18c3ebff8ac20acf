"""A reused output is one like a computed one, and no tensor is shared or written to."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import diffcache

TIMES = torch.linspace(1000, 400, 12)
pytestmark = pytest.mark.filterwarnings("ignore::diffcache.DiffcacheWarning")


@pytest.mark.peer_row(13)
@pytest.mark.parametrize("return_dict", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reused_outputs_look_like_computed_ones(
    policy, tiny_wan, return_dict, dtype, skips, reused
):
    """Class, tuple, shape, dtype, device, strides and autograd state of all 12 steps."""
    module = diffcache.wrap(tiny_wan().transformer.to(dtype), policy)
    looks, x = [], torch.randn(2, 4, 2, 8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    text = torch.ones(2, 6, 16, dtype=dtype)
    for t in TIMES:
        out = module(x, t.expand(2), text, return_dict=return_dict)
        tensor = out.sample if return_dict else out[0]
        looks.append(
            (type(out), len(out), tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
        )
        assert tensor.is_contiguous() and torch.isfinite(tensor).all()
        x = x - tensor / 12
    assert len(set(looks)) == 1 and looks[0][0].__name__ in ("tuple", "Transformer2DModelOutput")
    assert bool(reused(module)) == skips(policy)


@pytest.mark.peer_row(11)
def test_an_item_in_a_batch(policy, tiny_wan):
    """The same as alone, or the policy says that it decides per batch."""
    shared = policy.metric is not None or policy.predictor.adaptive
    assert policy.decides == ("batch" if shared or policy.guards.max_error else "item")
    if policy.decides == "batch":
        return
    module = diffcache.wrap(tiny_wan().transformer, policy)
    generator = torch.Generator().manual_seed(0)
    x, text = (torch.randn(3, *shape, generator=generator) for shape in [(4, 2, 8, 8), (6, 16)])

    def run(items):
        outputs, latents = [], x[items]
        for t in TIMES:
            out = module(latents, t.expand(len(latents)), text[items], return_dict=False)[0]
            outputs.append(out)
            latents = latents - out / 12
        return torch.stack(outputs), [row.decision for row in diffcache.report(module).rows]

    together, decided = run([0, 1, 2])
    for item in range(3):
        alone, decided_alone = run([item])
        torch.testing.assert_close(alone[:, 0], together[:, item], rtol=0, atol=1e-5)
        assert decided_alone == decided


def test_inputs_are_never_written_to(policy, tiny_wan):
    """Latents, time and text after each of 12 calls."""
    module = diffcache.wrap(tiny_wan().transformer, policy)
    for t in TIMES:
        given = [torch.full((1, 4, 2, 8, 8), float(t) / 1000), t.expand(1), torch.ones(1, 6, 16)]
        before = [tensor.clone() for tensor in given]
        module(*given, return_dict=False)
        assert all(map(torch.equal, given, before))


def test_held_tensors_are_ours_alone(policy, tiny_wan, loop):
    """Writing into inputs and outputs after a call changes nothing later."""

    def spoil(step, tensors):
        tensors[0].fill_(math.nan)

    def write_over(out):
        out.fill_(math.nan)

    expected = loop(diffcache.wrap(tiny_wan().transformer, policy), TIMES)
    found = loop(diffcache.wrap(tiny_wan().transformer, policy), TIMES, each=spoil)
    assert all(map(torch.equal, found, expected))
    first, second = (
        outputs_of(diffcache.wrap(tiny_wan().transformer, policy), then)
        for then in (lambda out: None, write_over)
    )
    assert all(map(torch.equal, first, second))


def outputs_of(module, then):
    """Outputs at 12 times for latents that move by themselves; `then` sees each output last."""
    x = torch.randn(1, 4, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    text, outputs = torch.ones(1, 6, 16), []
    for i, t in enumerate(TIMES):
        out = module(x * (1 - 0.02 * i), t.expand(1), text, return_dict=False)[0]
        outputs.append(out.clone())
        then(out)
    return outputs


class InPlaceBlock(nn.Module):
    """h + tanh(W h) / 2, written into h itself or not."""

    def __init__(self, in_place):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.in_place = in_place

    def forward(self, hidden_states, time):
        change = torch.tanh(self.linear(hidden_states) + time) / 2
        return hidden_states.add_(change) if self.in_place else hidden_states + change


class Plain(nn.Module):
    """Four blocks on [batch, tokens, 6]."""

    def __init__(self, in_place=False):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(InPlaceBlock(in_place) for _ in range(4))
        self.requires_grad_(False)

    def forward(self, hidden_states, timestep):
        hidden_states = hidden_states * 1
        for block in self.blocks:
            hidden_states = block(hidden_states, timestep / 1000)
        return hidden_states


class WritesIntoItsInput(Plain):
    """The model itself writes into what it is given."""

    def forward(self, hidden_states, timestep):
        for block in self.blocks:
            hidden_states = block(hidden_states, timestep / 1000)
        return hidden_states


def run_plain(module, spoiled=()):
    """Outputs at 12 times; the input is NaN at the steps `spoiled`."""
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    outputs = []
    for i, t in enumerate(TIMES):
        given = x * (1 - 0.03 * i)
        if i in spoiled:
            given[0, 0, 0] = math.nan
        outputs.append(module(given, t).clone())
    return outputs


@pytest.mark.peer_row(23)
@pytest.mark.parametrize("cls", [Plain, WritesIntoItsInput])
@pytest.mark.parametrize("site", [None, "stack", "span", "block", "model"])
def test_blocks_that_write_into_their_input(policy, cls, site, decisions):
    """Outputs and decisions are those of blocks that do not, at every site."""
    if site == "model" and policy.probe is not None and policy.probe.blocks:
        pytest.skip("a front probe needs blocks")
    parts = {} if site is None else {"site": site}
    one = diffcache.wrap(cls(in_place=False), policy, **parts)
    two = diffcache.wrap(cls(in_place=True), policy, **parts)
    expected = run_plain(one)
    for a, b in zip(run_plain(two), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert decisions(one) == decisions(two)
    diffcache.wrap(two, policy, **parts, **policy.exact)
    assert all(map(torch.equal, run_plain(two), run_plain(cls(in_place=True))))


@pytest.mark.peer_row(29)
@pytest.mark.parametrize("site", [None, "stack", "model"])
def test_nan_never_spreads(policy, site):
    """A NaN at one computed step: it comes out there alone; what follows is computed."""
    if site == "model" and policy.probe is not None and policy.probe.blocks:
        pytest.skip("a front probe needs blocks")
    parts = {} if site is None else {"site": site}
    module = diffcache.wrap(Plain(), policy, **parts)
    run_plain(module)
    before = [row.decision for row in diffcache.report(module).rows]
    for bad in range(1, 11):
        if before[bad] == "reuse":
            continue
        outputs = run_plain(module, spoiled=(bad,))
        report = diffcache.report(module)
        finite = [bool(torch.isfinite(out).all()) for out in outputs]
        assert finite == [step != bad for step in range(12)], bad
        assert report.rows[bad].decision == "compute"
        if before[bad + 1] == "reuse" and report.rows[bad + 1].decision == "compute":
            reasons = report.summary["reasons"]
            assert any("finite" in reason for reason in reasons), reasons


def test_non_finite_metric_is_counted(policy):
    """Where a metric is asked, a NaN in the input is a reason in the report."""
    if policy.metric is None:
        assert policy.probe is None
        return
    module = diffcache.wrap(Plain(), policy, warmup_steps=2)
    run_plain(module, spoiled=range(5, 9))
    rows = diffcache.report(module).rows[5:9]
    assert {row.decision for row in rows} == {"compute"}
    assert rows[0].reason == "non-finite metric"
    assert "non-finite metric" in str(diffcache.report(module))

"""The stack, span and block sites on models of many shapes, against plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import diffcache


class Block(nn.Module):
    """h + tanh(W h) / 2."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden_states):
        return hidden_states + 0.5 * torch.tanh(self.linear(hidden_states))


class InPlace(Block):
    """Writes into its input and hands it on."""

    def forward(self, hidden_states):
        return hidden_states.add_(0.5 * torch.tanh(self.linear(hidden_states)))


class Double(nn.Module):
    """Two streams of one shape, handed out as text, image."""

    def __init__(self):
        super().__init__()
        self.image, self.text = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden_states, encoder_hidden_states):
        image = hidden_states + 0.5 * torch.tanh(self.image(encoder_hidden_states))
        text = encoder_hidden_states + 0.5 * torch.tanh(self.text(hidden_states))
        return text, image


class WithNone(Block):
    """Hands out (None, hidden_states)."""

    def forward(self, hidden_states):
        return None, super().forward(hidden_states)


class Model(nn.Module):
    """Blocks of one class and a way to run them."""

    cls = Block

    def __init__(self, depth=4):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(self.cls() for _ in range(depth))
        self.requires_grad_(False)

    def forward(self, hidden_states, timestep):
        return self.stack(hidden_states * (1 + timestep / 1000))

    def stack(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class InPlaceModel(Model):
    """In-place blocks."""

    cls = InPlace


class TwoStreamModel(Model):
    """Image and text go in by keyword."""

    cls = Double

    def stack(self, x):
        text = x.flip(-1)
        for block in self.blocks:
            text, x = block(hidden_states=x, encoder_hidden_states=text)
        return x + text


class WithNoneModel(Model):
    """A tuple with an empty place."""

    cls = WithNone

    def stack(self, x):
        for block in self.blocks:
            _, x = block(x)
        return x


class HintModel(Model):
    """A control hint comes in after block 1."""

    def stack(self, x):
        for i, block in enumerate(self.blocks):
            x = block(x)
            x = x + 0.1 * x.mean() if i == 1 else x
        return x


class LongSkipModel(Model):
    """The last block is given the first one's output once more."""

    def stack(self, x):
        first = self.blocks[0](x)
        x = self.blocks[2](self.blocks[1](first))
        return self.blocks[3](x + first)


class TwiceModel(Model):
    """Every block runs twice."""

    def stack(self, x):
        for block in [*self.blocks, *self.blocks]:
            x = block(x)
        return x


class MixedModel(Model):
    """By position, then by keyword."""

    def stack(self, x):
        for i, block in enumerate(self.blocks):
            x = block(hidden_states=x) if i % 2 else block(x)
        return x


class ReadersModel(Model):
    """Every block's output is read outside the blocks: nothing can be skipped."""

    def stack(self, x):
        outputs = []
        for block in self.blocks:
            x = block(x)
            outputs.append(x)
        return sum(outputs)


FRIENDLY = [Model, InPlaceModel, TwoStreamModel, WithNoneModel, HintModel, TwiceModel, MixedModel]
TIMES = [1000.0 - 60 * i for i in range(14)]


def inputs(batch=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(TIMES), batch, 4, generator=generator)


def run(module, xs=None):
    xs = inputs() if xs is None else xs
    return [module(x, t) for x, t in zip(xs, TIMES, strict=True)]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def wrapped(cls, site="stack", policy="taylorseer", **settings):
    return diffcache.wrap(cls(), policy, site=site, **settings)


def decisions(module):
    return [row.decision for row in diffcache.report(module).rows]


@pytest.mark.parametrize("site", ["stack", "span", "block", {"kind": "stack", "front": 1}])
@pytest.mark.parametrize("cls", [*FRIENDLY, LongSkipModel, ReadersModel])
def test_computing_is_bit_identical(cls, site):
    """With all steps computed the outputs are the model's own, and no input is changed by us."""
    module, xs = wrapped(cls, site, interval=1), inputs()
    assert equal(run(module, xs), run(cls()))
    assert torch.equal(xs, inputs()) and "reuse" not in decisions(module)


@pytest.mark.parametrize("site", ["stack", "block"])
@pytest.mark.parametrize("cls", FRIENDLY)
def test_skipping_with_an_unchanged_input_changes_nothing(cls, site):
    """Hold and equal inputs: a reused step equals the computed one (times differ, inputs not)."""

    class Timeless(cls):
        def forward(self, hidden_states, timestep):
            return self.stack(hidden_states + 0)

    module, x = wrapped(Timeless, site, "taylorseer", order=0), inputs()[0]
    outputs = [module(x, t) for t in TIMES]
    assert "reuse" in decisions(module)
    for output in outputs:
        assert torch.allclose(output, Timeless()(x, 0.0), atol=1e-5)


@pytest.mark.parametrize("cls", FRIENDLY)
def test_stack_skips_what_it_says(cls):
    """All but steps 0-2, 7 and 12 are reused (warm-up 3, interval 5), in every region."""
    module = wrapped(cls)
    run(module)
    rows = diffcache.report(module).rows
    reused = set(range(14)) - {0, 1, 2, 7, 12}
    assert {row.step for row in rows if row.decision == "reuse"} == reused
    regions = 2 if cls is HintModel else 1
    assert len(rows) == 14 * regions
    saved = [sum(r.saved for r in rows if r.step == step) for step in range(14)]
    expected = [float(step in reused) for step in range(14)]
    assert saved == pytest.approx(expected)


@pytest.mark.parametrize("cls", [Model, InPlaceModel, MixedModel])
def test_stack_equals_a_plain_loop(cls):
    """Held residual of blocks 1-3, block 0 always computed, by hand."""
    site = {"kind": "stack", "front": 1}
    got = run(wrapped(cls, site, order=0))
    blocks, residual = Model().blocks, None
    for step, (x, t) in enumerate(zip(inputs(), TIMES, strict=True)):
        front = blocks[0](x * (1 + t / 1000))
        if step < 3 or step in (7, 12):
            out = blocks[3](blocks[2](blocks[1](front)))
            residual = out - front
        assert torch.allclose(got[step], front + residual, atol=1e-6)


def test_block_site_equals_a_plain_loop():
    """Every block but the anchor holds its own residual."""
    got = run(wrapped(Model, "block", order=0))
    blocks, residuals = Model().blocks, {}
    for step, (x, t) in enumerate(zip(inputs(), TIMES, strict=True)):
        h = x * (1 + t / 1000)
        for i, block in enumerate(blocks):
            if i == 0 or step < 3 or step in (7, 12):
                residuals[i] = block(h) - h
            h = h + residuals[i]
        assert torch.allclose(got[step], h, atol=1e-6)


@pytest.mark.parametrize("cls", [LongSkipModel, ReadersModel])
@pytest.mark.parametrize("site", ["stack", {"kind": "span", "start": 1, "end": 3}])
def test_outputs_read_elsewhere_are_never_wrong(cls, site):
    """Either refused with a reason, or reused only where nobody else looks."""

    class Still(cls):
        def forward(self, hidden_states, timestep):
            return self.stack(hidden_states + 0)

    module, x = wrapped(Still, site, order=0), inputs()[0]
    for t in TIMES:
        assert torch.allclose(module(x, t), Still()(x, 0.0), atol=1e-5)
    notes = diffcache.report(module).summary["notes"]
    assert "reuse" in decisions(module) or any("site='model'" in note for note in notes)


def test_refusal_is_said_once_and_computes():
    """The reason stands in the rows and once in the notes; outputs are the model's own."""
    module = wrapped(ReadersModel)
    assert equal(run(module), run(ReadersModel()))
    report = diffcache.report(module)
    assert sum("site='model'" in note for note in report.summary["notes"]) <= 2
    assert set(decisions(module)) == {"compute"}


def test_changing_structure_in_mid_run():
    """Layers left out from step 6 on (skip-layer guidance): full and right from there."""

    class Skipping(Model):
        skip = ()

        def stack(self, x):
            for i, block in enumerate(self.blocks):
                x = x if i in self.skip else block(x)
            return x

    module, plain = wrapped(Skipping), Skipping()
    for step, (x, t) in enumerate(zip(inputs(), TIMES, strict=True)):
        module.skip = plain.skip = (2,) if step >= 6 else ()
        output = module(x, t)
        if decisions(module)[-1] == "compute":
            assert torch.equal(output, plain(x, t))
        assert len(diffcache.report(module).rows) == step + 1
    assert decisions(module)[6] == "compute"


def test_error_inside_a_block():
    """An exception reaches the caller, the list is whole, the next run is as fresh."""
    module, first = wrapped(Model), inputs()[0]
    expected = run(wrapped(Model))
    with pytest.raises(RuntimeError):
        module(first[:, :3], TIMES[0])
    assert [type(block) for block in module.blocks] == [Block] * 4
    assert equal(run(module), expected)


@pytest.mark.parametrize("site", ["stack", "block"])
def test_memory_is_the_formula(site):
    """One residual for each region and order + 1 times: bytes by hand."""
    module = wrapped(Model, site, order=1)
    run(module)
    regions = {"stack": 1, "block": 3}[site]
    assert diffcache.report(module).summary["bytes_held"] == regions * 2 * (2 * 4 * 4)


def test_two_lists_are_one_stack():
    """Double blocks, then single blocks with one stream: regions end between the lists."""

    class TwoLists(Model):
        def __init__(self):
            super().__init__(depth=2)
            self.single = nn.ModuleList(Block() for _ in range(3)).requires_grad_(False)

        def stack(self, x):
            x = super().stack(x)
            x = torch.cat([x, x], 0)
            for block in self.single:
                x = block(x)
            return x

    module = wrapped(TwoLists, order=0)
    assert equal(run(module)[:3], run(TwoLists())[:3])
    rows = diffcache.report(module).rows
    saved = sum(row.saved for row in rows if row.step == 4)
    assert saved == pytest.approx(1.0) and len(rows) == 28


@pytest.mark.parametrize(
    ("site", "message"),
    [
        ({"kind": "stack", "front": 4}, "below the number of blocks (4)"),
        ({"kind": "span", "start": 2, "end": 9}, "within the 4 blocks"),
        ({"kind": "block", "anchor": 4}, "below the number of blocks (4)"),
    ],
)
def test_sites_that_do_not_fit_are_refused_at_once(site, message):
    """At wrap, and the module stays unwrapped."""
    module = Model()
    with pytest.raises(ValueError) as caught:
        diffcache.wrap(module, "taylorseer", site=site)
    assert message in str(caught.value) and "forward" not in module.__dict__

"""Lists of blocks, and the contract that watching one forward writes down."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diffcache.blocks import Contract, Observer, find_block_lists, pack, tensors_of
from diffcache.spans import shimmed


class Block(nn.Module):
    """One stream, a new tensor out."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden_states, other=None):
        return hidden_states + torch.tanh(self.linear(hidden_states))


class InPlace(Block):
    """Writes into its input and returns it."""

    def forward(self, hidden_states):
        return hidden_states.add_(torch.tanh(self.linear(hidden_states)))


class Scribbler(Block):
    """Returns a new tensor but spoils its input."""

    def forward(self, hidden_states):
        out = super().forward(hidden_states)
        hidden_states.zero_()
        return out


class TwoStreams(Block):
    """Image and text of equal shape, handed out in the order text, image."""

    def forward(self, hidden_states, encoder_hidden_states):
        image = hidden_states + torch.tanh(self.linear(encoder_hidden_states))
        return encoder_hidden_states * 1.5, image


class WithNone(Block):
    """A tuple whose second place is empty."""

    def forward(self, hidden_states):
        return super().forward(hidden_states), None


class Sizes(Block):
    """What comes out continues nothing that came in."""

    def forward(self, hidden_states):
        return hidden_states.repeat(1, 2)


class Stack(nn.Module):
    """Blocks and a way to run them."""

    def __init__(self, cls, depth=4, run=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(cls() for _ in range(depth))
        self.run = run
        self.requires_grad_(False)

    def forward(self, hidden_states):
        if self.run is not None:
            return self.run(self.blocks, hidden_states)
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states


def keyword(blocks, x):
    for block in blocks:
        x = block(hidden_states=x)
    return x


def mixed(blocks, x):
    for i, block in enumerate(blocks):
        x = block(hidden_states=x) if i % 2 else block(x)
    return x


def swapped(blocks, x):
    """The tuple comes out as text, image and goes in as image, text."""
    image, text = x, x + 1
    for block in blocks:
        text, image = block(image, text)
    return image


def with_none(blocks, x):
    for block in blocks:
        x, _ = block(x)
    return x


def hint(blocks, x):
    """A ControlNet hint comes in after block 1."""
    for i, block in enumerate(blocks):
        x = block(x)
        if i == 1:
            x = x + 0.5
    return x


def long_skip(blocks, x):
    """Block 3 is also given what block 0 handed out."""
    first = blocks[0](x)
    x = blocks[2](blocks[1](first))
    return blocks[3](x, other=first)


def twice(blocks, x):
    """Every block runs twice."""
    for block in [*blocks, *blocks]:
        x = block(x)
    return x


def parallel(blocks, x):
    """Blocks side by side: nothing continues anything."""
    return sum(block(x) for block in blocks)


def observe(model, x):
    """The contract of one forward, and its output."""
    observer = Observer()
    with shimmed(find_block_lists(model), observer.block):
        output = model(x)
    return observer.contract(), output


def fresh():
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


def regions(contract, start=0, per_block=False):
    return [
        (r.start, r.stop) for r in contract.regions(range(start, len(contract.calls)), per_block)
    ]


@pytest.mark.parametrize(
    ("cls", "run", "expected"),
    [
        (Block, None, [(0, 4)]),
        (Block, keyword, [(0, 4)]),
        (Block, mixed, [(0, 4)]),
        (InPlace, None, [(0, 4)]),
        (Scribbler, None, [(0, 4)]),
        (TwoStreams, swapped, [(0, 4)]),
        (WithNone, with_none, [(0, 4)]),
        (Block, hint, [(0, 2), (2, 4)]),
        (Block, long_skip, [(0, 1), (1, 4)]),
        (Block, twice, [(0, 8)]),
        (Block, parallel, [(0, 1), (1, 2), (2, 3), (3, 4)]),
    ],
)
def test_regions(cls, run, expected):
    """Runs of blocks end where something else than the last output goes in."""
    contract, _ = observe(Stack(cls, run=run), fresh())
    assert regions(contract) == expected
    each = [(i, i + 1) for i in range(len(contract.calls))]
    assert regions(contract, per_block=True) == each


@pytest.mark.parametrize("cls", [Block, InPlace, Scribbler])
def test_watching_changes_nothing(cls):
    """The observed output is the output, to the bit."""
    model = Stack(cls)
    _, output = observe(model, fresh())
    assert torch.equal(output, model(fresh()))


def test_a_hint_splits_though_it_stands_in_the_middle_of_the_span():
    """A span that starts at 1 has the regions 1-2 and 2-4."""
    contract, _ = observe(Stack(Block, run=hint), fresh())
    assert regions(contract, start=1) == [(1, 2), (2, 4)]


@pytest.mark.parametrize(("cls", "expected"), [(Block, False), (InPlace, True), (Scribbler, True)])
def test_mutation_is_noticed(cls, expected):
    """By content, so also where a new tensor is returned."""
    contract, _ = observe(Stack(cls), fresh())
    assert [call.mutates for call in contract.calls] == [expected] * 4


def test_mutation_with_nan_is_not_invented():
    """NaN differs from itself; that is no mutation."""
    contract, _ = observe(Stack(Block), fresh() * float("nan"))
    assert not any(call.mutates for call in contract.calls)


def test_streams_of_equal_shape_are_told_apart():
    """Which argument a place in the tuple continues is seen from the next block's call."""
    contract, _ = observe(Stack(TwoStreams, run=swapped), fresh())
    assert [call.streams for call in contract.calls[:3]] == [[1, 0]] * 3
    assert contract.calls[0].shape == (True, True)


def test_keyword_streams():
    """Arguments are known as they were passed."""
    contract, _ = observe(Stack(Block, run=mixed), fresh())
    assert [call.streams for call in contract.calls] == [[0], ["hidden_states"]] * 2


def test_names_are_paths():
    """A block that runs twice is listed twice."""
    contract, _ = observe(Stack(Block, depth=2, run=twice), fresh())
    assert [call.name for call in contract.calls] == ["blocks.0", "blocks.1"] * 2


def test_blocks_that_continue_nothing():
    """An output of another size has no stream, so nothing can stand in for it."""
    contract, _ = observe(Stack(Sizes, depth=3), fresh())
    assert [call.streams for call in contract.calls] == [[None]] * 3


@pytest.mark.parametrize("output", [{"a": torch.ones(1)}, "text", (torch.ones(1), 3), None])
def test_outputs_that_are_no_streams(output):
    """Only tensors and flat tuples of tensors and None are streams."""
    assert tensors_of(output) is None


@pytest.mark.parametrize("places", [None, (True,), (True, False), (False, True, True)])
def test_pack_is_the_inverse(places):
    """Bare tensors stay bare, empty places empty."""
    count = 1 if places is None else sum(places)
    tensors = tuple(torch.full((1,), float(i)) for i in range(count))
    found, shape = tensors_of(pack(tensors, places))
    assert shape == places and all(a is b for a, b in zip(found, tensors, strict=True))


def test_lists_are_found_where_they_lie():
    """Two lists side by side, in the order of definition; nested ones below them are not taken."""
    model = nn.Module()
    model.double = nn.ModuleList(Stack(Block, depth=2) for _ in range(3))
    model.single = nn.ModuleList(Block() for _ in range(2))
    model.other = nn.ModuleList([Block(), nn.Linear(2, 2)])
    model.one = nn.ModuleList([Block()])
    found = [(item.path, len(item)) for item in find_block_lists(model)]
    assert found == [("double", 3), ("single", 2)]


def test_lists_below_the_top():
    """The shallowest level that has any."""
    model = nn.Module()
    model.inner = Stack(Block, depth=3)
    assert [item.path for item in find_block_lists(model)] == ["inner.blocks"]


def test_lists_of_leaves_are_not_blocks():
    """Three Linear layers are a head, not a stack of blocks; nothing found is an empty list."""
    model = nn.Module()
    model.head = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert find_block_lists(model) == [] and find_block_lists(nn.Linear(2, 2)) == []


def test_empty_contract():
    """A forward that ran no block has no regions."""
    assert Contract([]).regions(range(0), False) == []

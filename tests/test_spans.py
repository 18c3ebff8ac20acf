"""One forward with blocks replaced: what is skipped, learned, and when it is called off."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diffcache.blocks import Observer, find_block_lists
from diffcache.spans import ContractBroken, GuidedPass, Shim, shimmed


class Block(nn.Module):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0
        self.gradient_checkpointing = "as it was"

    def forward(self, hidden_states):
        self.calls += 1
        return hidden_states + torch.tanh(self.linear(hidden_states))


class InPlace(Block):
    """Writes into its input."""

    def forward(self, hidden_states):
        self.calls += 1
        return hidden_states.add_(torch.tanh(self.linear(hidden_states)))


class Model(nn.Module):
    """`order` may be changed between calls; `between` is called before each block but the first."""

    def __init__(self, cls=Block, depth=4):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(cls() for _ in range(depth))
        self.order = list(range(depth))
        self.between = lambda x: x
        self.requires_grad_(False)

    def forward(self, x):
        for place, index in enumerate(self.order):
            x = self.blocks[index](self.between(x) if place else x)
        return x


def fresh(seed=1):
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))


def contract_of(model):
    observer = Observer()
    with shimmed(find_block_lists(model), observer.block):
        model(fresh())
    for block in model.blocks:
        block.calls = 0
    return observer.contract()


def guided(model, regions, decide, learn=lambda *_: None, x=None):
    """One forward under the model's contract; returns output and pass."""
    run = GuidedPass(contract_of(model), regions, decide, learn)
    with shimmed(find_block_lists(model), run.block):
        output = model(fresh() if x is None else x)
    return output, run


def compute(*_):
    return None


@pytest.mark.parametrize("cls", [Block, InPlace])
@pytest.mark.parametrize("regions", [[range(0, 4)], [range(1, 3)], [range(0, 1), range(2, 4)]])
def test_learned_residuals_are_out_minus_in(cls, regions):
    """By hand, also where the blocks write over what came in."""
    model, learned = Model(cls), {}
    output, run = guided(model, regions, compute, learned.__setitem__)
    assert learned == {}
    run.finish()
    states = [fresh()]
    for block in model.blocks:
        states.append(block(states[-1].clone()))
    assert torch.equal(output, states[-1])
    assert list(learned) == regions
    for region, (residual,) in learned.items():
        assert torch.allclose(residual, states[region.stop] - states[region.start])


@pytest.mark.parametrize("cls", [Block, InPlace])
@pytest.mark.parametrize("region", [range(0, 4), range(1, 4), range(1, 3), range(3, 4)])
def test_skipping_adds_the_residual(cls, region):
    """Entry plus residual comes out, the blocks within do not run, those around it do."""
    model, residual = Model(cls), fresh(7)
    output, run = guided(model, [region], lambda *_: (residual,))
    run.finish()
    assert [block.calls for block in model.blocks] == [int(i not in region) for i in range(4)]
    x = fresh()
    for block in model.blocks[: region.start]:
        x = block(x)
    x = x + residual
    for block in model.blocks[region.stop :]:
        x = block(x)
    assert torch.allclose(output, x)


def test_a_skip_does_not_touch_its_input():
    """The latents given to the model are as before."""
    model, x = Model(), fresh()
    guided(model, [range(0, 4)], lambda *_: (torch.ones(2, 4),), x=x)
    assert torch.equal(x, fresh())


def test_decide_sees_entry_and_front():
    """The region's entry streams and what went into the first block."""
    model, seen = Model(), []
    guided(model, [range(2, 4)], lambda region, entry, front: seen.append((region, entry, front)))
    ((region, (entry,), front),) = seen
    expected = model.blocks[1](model.blocks[0](fresh()))
    assert region == range(2, 4)
    assert torch.equal(entry, expected) and torch.equal(front, fresh())


def test_front_of_mutating_blocks_is_a_copy():
    """Block 0 writes over what went in; the probe still sees it as it was."""
    seen = []
    guided(Model(InPlace), [range(1, 4)], lambda region, entry, front: seen.append(front))
    assert torch.equal(seen[0], fresh())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"order": [0, 2, 1, 3]}, "ran out of the order observed"),
        ({"order": [0, 1, 2, 3, 3]}, "ran out of the order observed"),
        ({"order": [1, 2, 3]}, "ran out of the order observed"),
        ({"between": lambda x: x + 1}, "something came in between"),
        ({"between": lambda x: x.clone()}, "something came in between"),
    ],
)
def test_another_structure_is_called_off(change, message):
    """Another order, block or input than observed: nothing of this pass may be used."""
    model = Model()
    run = GuidedPass(contract_of(model), [range(1, 4)], lambda *_: (torch.ones(2, 4),), compute)
    for name, value in change.items():
        setattr(model, name, value)
    with (
        pytest.raises(ContractBroken, match=message),
        shimmed(find_block_lists(model), run.block),
    ):
        model(fresh())


def test_fewer_blocks_are_noticed_at_the_end():
    """Layers left out (skip-layer guidance): finish refuses, and nothing was learned."""
    model, learned = Model(), {}
    run = GuidedPass(contract_of(model), [range(0, 2)], compute, learned.__setitem__)
    model.order = [0, 1, 2]
    with shimmed(find_block_lists(model), run.block):
        model(fresh())
    with pytest.raises(ContractBroken, match="3 blocks ran, not 4"):
        run.finish()
    assert not learned


def test_shims_are_taken_out_after_an_error():
    """Whatever happens, the list holds the blocks again."""
    model = Model()
    before = list(model.blocks)

    def fail(*_):
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"), shimmed(find_block_lists(model), fail):
        model(fresh())
    assert all(a is b for a, b in zip(before, model.blocks, strict=True))
    assert list(model.blocks._modules) == ["0", "1", "2", "3"]


def test_shim_looks_like_its_block():
    """Attributes, class and parameters are the block's, so loops that ask get its answers."""
    block = Block()
    shim = Shim("blocks.0", block, lambda name, block, args, kwargs: (name, args, kwargs))
    assert isinstance(shim, Block) and isinstance(shim, nn.Module)
    assert shim.gradient_checkpointing == "as it was" and shim.linear is block.linear
    assert next(iter(shim.parameters())) is block.linear.weight
    assert shim(1, a=2) == ("blocks.0", (1,), {"a": 2})
    with pytest.raises(AttributeError):
        _ = shim.nothing_of_that_name


def test_state_dict_and_indexing_during_a_call():
    """Within a call len, slices and iteration of the list still work."""
    model = Model()
    with shimmed(find_block_lists(model), lambda name, block, args, kwargs: block(*args, **kwargs)):
        assert len(model.blocks) == 4 and isinstance(model.blocks[-1], Block)
        assert [type(b) for b in model.blocks[1:3]] == [Shim, Shim] or len(model.blocks[1:3]) == 2
        assert torch.equal(model(fresh()), Model()(fresh()))

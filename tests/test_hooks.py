"""Hooks on instances: put on, taken off from anywhere in a pile, copied, compiled."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import weakref

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry
from diffusers.hooks import ModelHook as DiffusersHook
from torch import nn

import diffcache
from diffcache.hooks import InstancePatch


class Block(nn.Module):
    """h + tanh(W h)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden_states):
        return hidden_states + torch.tanh(self.linear(hidden_states))


class Denoiser(nn.Module):
    """Four blocks and a time."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.requires_grad_(False)

    def forward(self, hidden_states, timestep):
        hidden_states = hidden_states + timestep / 1000
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states


def run(module, steps=12):
    """The outputs of a bare loop, [steps, 2, 4]; the input moves from step to step."""
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
    return torch.stack([module(x * (1 + 0.1 * i), 1000.0 - 50 * i) for i in range(steps)])


def skips(module, steps=12):
    """Whether any output of a loop is the one before."""
    out = run(module, steps)
    return any(torch.equal(a, b) for a, b in itertools.pairwise(out))


def state(module):
    """What unwrap must restore: instance dictionaries, by identity where it matters."""
    own = {name: id(value) for name, value in module.__dict__.items()}
    return own, {name: id(value) for name, value in module.blocks._modules.items()}


class Doubling(ModelHook):
    """An accelerate hook that doubles the output."""

    def post_forward(self, module, output):
        return 2 * output


class Adding(DiffusersHook):
    """A diffusers hook that adds one to the output."""

    def post_forward(self, module, output):
        return output + 1


def put_accelerate(module):
    add_hook_to_module(module, Doubling(), append=True)
    return lambda: remove_hook_from_module(module)


def put_diffusers(module):
    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(Adding(), "adding")
    return lambda: registry.remove_hook("adding", recurse=False)


def put_own(module):
    """Somebody's own wrapper, which nobody takes off."""
    inner = module.forward
    module.forward = functools.wraps(inner)(lambda *args, **kwargs: inner(*args, **kwargs) * 3)
    return lambda: module.__dict__.pop("forward")


OTHERS = {"accelerate": put_accelerate, "diffusers": put_diffusers}
SITES = ["model", "stack"]


@pytest.mark.parametrize("site", SITES)
def test_wrap_and_unwrap_restore_the_dictionaries(site):
    """After unwrap every instance dictionary holds the very objects it held before."""
    module = Denoiser()
    run(module)
    before = state(module)
    for _ in range(2):
        diffcache.wrap(module, "hold", site=site)
        run(module)
        diffcache.unwrap(module)
        assert state(module) == before
    assert torch.equal(run(module), run(Denoiser()))


def test_patch_puts_back_what_stood_there():
    """An own `forward` in the dictionary is put back, not deleted."""
    module = Denoiser()
    put_own(module)
    own = module.__dict__["forward"]
    expected = run(module)
    diffcache.wrap(module, "hold")
    assert skips(module)
    diffcache.unwrap(module)
    assert module.__dict__["forward"] is own and torch.equal(run(module), expected)


def test_patch_on_top_is_left_alone():
    """A patch that is no longer the topmost says so and removes nothing."""
    module = Denoiser()
    patch = InstancePatch(module, "name", "ours")
    module.__dict__["name"] = "theirs"
    assert not patch.remove() and module.name == "theirs"


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("name", OTHERS)
def test_another_hook_below(name, site):
    """Their hook first, ours on top: taken off in the same turn, theirs goes on working."""
    module, twin = Denoiser(), Denoiser()
    remove = OTHERS[name](module)
    OTHERS[name](twin)
    expected, before = run(twin), state(module)
    diffcache.wrap(module, "hold", site=site)
    assert torch.equal(run(module)[:3], expected[:3]) and rows(module) == 12
    diffcache.unwrap(module)
    assert torch.equal(run(module), expected) and state(module)[0] == before[0]
    remove()
    assert torch.equal(run(module), run(Denoiser()))


def rows(module):
    return len(diffcache.report(module).rows)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("name", OTHERS)
def test_another_hook_on_top(name, site):
    """Ours first, theirs on top, ours taken off from below: theirs goes on working."""
    module, twin = diffcache.wrap(Denoiser(), "hold", site=site), Denoiser()
    remove = OTHERS[name](module)
    remove_twin = OTHERS[name](twin)
    assert torch.equal(run(module)[:3], run(twin)[:3]) and rows(module) == 12
    diffcache.unwrap(module)
    assert torch.equal(run(module), run(twin))
    remove()
    remove_twin()
    assert torch.equal(run(module), run(Denoiser()))
    assert module.__dict__.keys() == twin.__dict__.keys()
    assert "diffcache" not in repr(module.__dict__.get("forward"))


@pytest.mark.parametrize("name", OTHERS)
def test_another_hook_taken_off_first(name):
    """Theirs on top comes off while we are on: we go on, then come off without a trace.

    (They leave the class's own bound method behind in the twin's dictionary.)
    """
    module, twin = diffcache.wrap(Denoiser(), "hold"), Denoiser()
    OTHERS[name](module)()
    OTHERS[name](twin)()
    assert skips(module)
    diffcache.unwrap(module)
    assert torch.equal(run(module), run(twin))
    assert module.__dict__.keys() - {"forward"} == twin.__dict__.keys() - {"forward"}
    assert module.forward == Denoiser.forward.__get__(module)


@pytest.mark.parametrize("first", OTHERS)
@pytest.mark.parametrize("second", OTHERS)
def test_hooks_on_both_sides(first, second):
    """One below and one on top of ours; ours goes, both stay."""
    if first == second == "diffusers":
        pytest.skip("a diffusers hook name can be registered once")
    module, twin = Denoiser(), Denoiser()
    OTHERS[first](module)
    diffcache.wrap(module, "hold")
    OTHERS[second](module)
    for name in (first, second):
        OTHERS[name](twin)
    assert torch.equal(run(module)[:3], run(twin)[:3])
    diffcache.unwrap(module)
    assert torch.equal(run(module), run(twin))


def test_forward_hooks_of_torch_still_run():
    """register_forward_hook sees reused outputs too."""
    module, seen = diffcache.wrap(Denoiser(), "hold"), []
    module.register_forward_hook(lambda module, args, output: seen.append(output))
    out = run(module)
    assert len(seen) == 12 and torch.equal(torch.stack(seen), out)


@pytest.mark.parametrize("site", SITES)
def test_deepcopy_of_a_wrapped_module(site):
    """The copy is not wrapped, has its own weights, can be wrapped; the original goes on."""
    module = diffcache.wrap(Denoiser(), "hold", site=site)
    run(module)
    twin = copy.deepcopy(module)
    with pytest.raises(ValueError, match="not wrapped"):
        diffcache.report(twin)
    with torch.no_grad():
        twin.blocks[0].linear.weight.add_(1)
    changed = Denoiser()
    with torch.no_grad():
        changed.blocks[0].linear.weight.add_(1)
    assert torch.equal(run(twin), run(changed))
    before = rows(module)
    diffcache.wrap(twin, "hold", site=site)
    run(twin)
    assert any(row.decision == "reuse" for row in diffcache.report(twin).rows)
    assert rows(module) == before == 12
    diffcache.unwrap(twin)
    assert torch.equal(run(twin), run(changed))


def test_pickle_of_a_wrapped_module():
    """torch.save of the whole module gives one that is not wrapped."""
    module, buffer = diffcache.wrap(Denoiser(), "hold"), io.BytesIO()
    run(module)
    torch.save(module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(run(loaded), run(Denoiser()))


@pytest.mark.parametrize("wrapped", [True, False])
def test_freed_after_use(wrapped):
    """A deleted module goes, wrapped or unwrapped, and what it held with it."""
    module = diffcache.wrap(Denoiser(), "hold")
    run(module)
    if not wrapped:
        diffcache.unwrap(module)
    reference, weight = weakref.ref(module), weakref.ref(module.blocks[0].linear.weight)
    del module
    gc.collect()
    assert reference() is None and weight() is None


def test_modules_of_one_class_do_not_interact():
    """Wrapping one leaves its twin and its class alone."""
    one, two = diffcache.wrap(Denoiser(), "hold"), Denoiser()
    run(one)
    assert "forward" not in two.__dict__ and torch.equal(run(two), run(Denoiser()))
    assert Denoiser.forward.__qualname__ == "Denoiser.forward"


def test_state_dict_and_parameters_are_untouched():
    """Names and order are the stock module's, during and after."""
    module, names = diffcache.wrap(Denoiser(), "hold", site="stack"), list(Denoiser().state_dict())
    run(module)
    assert list(module.state_dict()) == names == [name for name, _ in module.named_parameters()]
    module.load_state_dict(Denoiser(seed=3).state_dict())
    assert torch.equal(run(diffcache.unwrap(module)), run(Denoiser(seed=3)))

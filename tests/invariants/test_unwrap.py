"""After unwrap nothing tells a pipeline from a twin that was never wrapped."""

from __future__ import annotations

import functools
import gc
import weakref

import diffusers.models.transformers.transformer_wan as wan_module
import diffusers.pipelines.wan.pipeline_wan as pipeline_module
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers import DiffusionPipeline, ModelMixin, UniPCMultistepScheduler
from diffusers.hooks import HookRegistry
from diffusers.hooks import ModelHook as DiffusersHook
from torch import nn

import diffcache

CLASSES = (
    pipeline_module.WanPipeline,
    DiffusionPipeline,
    wan_module.WanTransformer3DModel,
    wan_module.WanTransformerBlock,
    ModelMixin,
    UniPCMultistepScheduler,
    nn.Module,
    nn.ModuleList,
)
LIBRARIES = (wan_module, pipeline_module, nn.modules.module, torch.nn.functional)


def belongings(pipe):
    """Names in every instance dictionary that we could have touched, by owner."""
    owners = {"pipe": pipe, "scheduler": pipe.scheduler}
    owners |= {f"transformer.{name}": module for name, module in pipe.transformer.named_modules()}
    return {name: set(owner.__dict__) for name, owner in owners.items()}


def held(pipe):
    """The identity of what stands in the dictionaries of the denoiser and its blocks."""
    ids = {}
    for name, module in pipe.transformer.named_modules():
        for key, value in module.__dict__.items():
            ids[name, key] = id(value)
        for kind in ("_modules", "_parameters", "_buffers", "_forward_hooks"):
            for key, value in getattr(module, kind).items():
                ids[name, kind, key] = id(value)
    return ids


def test_unwrapped_equals_a_twin(policy, tiny_wan, run):
    """Dictionaries, hooks, class and outputs; the twin made the same calls."""
    pipe, twin = tiny_wan(), tiny_wan()
    run(pipe)
    before = held(pipe)
    diffcache.wrap(pipe, policy)
    run(pipe)
    assert diffcache.unwrap(pipe) is pipe
    assert held(pipe) == before and type(pipe) is type(twin)
    run(twin)
    run(twin)
    assert belongings(pipe) == belongings(twin)
    assert not any(module._forward_hooks for module in pipe.transformer.modules())
    assert torch.equal(run(pipe), run(twin))


def test_unwrap_after_a_cancelled_run(policy, tiny_wan, run):
    """The same where an exception ended the run."""
    pipe, twin = diffcache.wrap(tiny_wan(), policy), tiny_wan()

    def cancel(pipe, step, t, tensors):
        if step == 5:
            raise InterruptedError
        return tensors

    for one in (pipe, twin):
        with pytest.raises(InterruptedError):
            run(one, callback_on_step_end=cancel)
    diffcache.unwrap(pipe)
    assert belongings(pipe) == belongings(twin)
    assert torch.equal(run(pipe), run(twin))


def test_what_stood_in_the_dictionaries_is_put_back(policy, tiny_wan, run, plain):
    """Own values of forward, cache_context and maybe_free_model_hooks."""
    pipe = tiny_wan()
    transformer, seen = pipe.transformer, []
    own_forward = functools.partial(type(transformer).forward, transformer)
    own_context = transformer.cache_context

    def own_free():
        seen.append("freed")

    transformer.forward, transformer.cache_context = own_forward, own_context
    pipe.maybe_free_model_hooks = own_free
    diffcache.wrap(pipe, policy)
    run(pipe)
    assert seen == ["freed"]
    diffcache.unwrap(pipe)
    assert transformer.__dict__["forward"] is own_forward
    assert transformer.__dict__["cache_context"] is own_context
    assert pipe.__dict__["maybe_free_model_hooks"] is own_free
    assert torch.equal(run(pipe), plain())


class Halving(ModelHook):
    """An accelerate hook that halves the output."""

    def post_forward(self, module, output):
        return (output[0] / 2,)


class Shifting(DiffusersHook):
    """A diffusers hook that adds one tenth."""

    def post_forward(self, module, output):
        return (output[0] + 0.1,)


def put_accelerate(module):
    add_hook_to_module(module, Halving(), append=True)
    return lambda: remove_hook_from_module(module)


def put_diffusers(module):
    registry = HookRegistry.check_if_exists_or_initialize(module)
    registry.register_hook(Shifting(), "shifting")
    return lambda: registry.remove_hook("shifting", recurse=False)


def put_own(module):
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args, **kwargs):
        return (inner(*args, **kwargs)[0] * 0.7,)

    module.forward = forward
    return None


@pytest.mark.parametrize("put", [put_accelerate, put_diffusers, put_own])
def test_hooks_put_on_after_ours_keep_working(policy, tiny_wan, run, plain, put):
    """They work while we are on, after we are gone, and come off by themselves."""
    pipe, twin = diffcache.wrap(tiny_wan(), policy), tiny_wan()
    take_off, take_off_twin = put(pipe.transformer), put(twin.transformer)
    run(pipe)
    assert diffcache.report(pipe).summary["calls"] == 18
    diffcache.unwrap(pipe)
    expected = run(twin)
    assert torch.equal(run(pipe), expected)
    assert not torch.equal(expected, plain())
    if take_off is not None:
        take_off()
        take_off_twin()
        assert torch.equal(run(pipe), plain())
    assert belongings(pipe) == belongings(twin)


def test_offload_put_on_after_ours_outlives_unwrap(policy, tiny_wan, run, plain):
    """wrap, offload, unwrap, run, remove_all_hooks."""
    pipe, twin = diffcache.wrap(tiny_wan(), policy), tiny_wan()
    pipe.enable_model_cpu_offload(device="cpu")
    twin.enable_model_cpu_offload(device="cpu")
    run(pipe)
    diffcache.unwrap(pipe)
    assert hasattr(pipe.transformer, "_hf_hook")
    assert torch.equal(run(pipe), run(twin))
    pipe.remove_all_hooks()
    twin.remove_all_hooks()
    assert torch.equal(run(pipe), plain())
    assert "diffcache" not in repr(pipe.transformer.__dict__.get("forward"))


@pytest.mark.peer_row(30)
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_pipelines_of_one_class_do_not_interact(policy, tiny_wan, run, plain, decisions, order):
    """Two wrapped, one of them unwrapped, a third never wrapped and a fourth made late."""
    alone = run(diffcache.wrap(tiny_wan(), policy))
    pipes = {"a": diffcache.wrap(tiny_wan(), policy), "b": diffcache.wrap(tiny_wan(), policy)}
    third = tiny_wan()
    assert torch.equal(run(pipes["a"]), alone)
    before = decisions(pipes["a"])
    assert torch.equal(run(pipes["b"]), alone)
    assert decisions(pipes["a"]) == before
    diffcache.unwrap(pipes[order[0]])
    assert torch.equal(run(pipes[order[0]]), plain())
    assert torch.equal(run(pipes[order[1]]), alone)
    assert torch.equal(run(third), plain()) and torch.equal(run(tiny_wan()), plain())
    diffcache.unwrap(pipes[order[1]])
    assert torch.equal(run(pipes[order[1]]), plain())


def test_interleaved_loops_do_not_interact(policy, tiny_wan, run):
    """One pipeline's run inside another one's callback."""
    alone = run(diffcache.wrap(tiny_wan(), policy))
    outer, inner = (diffcache.wrap(tiny_wan(), policy) for _ in range(2))

    def run_inner(pipe, step, t, tensors):
        if step in (3, 4):
            assert torch.equal(run(inner), alone)
        return tensors

    assert torch.equal(run(outer, callback_on_step_end=run_inner), alone)


@pytest.mark.parametrize("end", ["unwrapped", "wrapped", "cancelled"])
def test_freed_after_use(policy, tiny_wan, run, end):
    """Pipeline, denoiser and weights go once nobody holds them."""
    pipe = diffcache.wrap(tiny_wan(), policy)
    run(pipe)
    if end == "unwrapped":
        diffcache.unwrap(pipe)
    if end == "cancelled":
        with pytest.raises(ZeroDivisionError):
            run(pipe, callback_on_step_end=lambda *_: 1 / 0)
    parts = (pipe, pipe.transformer, pipe.transformer.blocks[0], pipe.scheduler)
    references = [weakref.ref(part) for part in parts]
    references.append(weakref.ref(pipe.transformer.proj_out.weight))
    del pipe, parts
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)


def test_nothing_is_written_on_classes_or_libraries(policy, tiny_wan, run):
    """Class dictionaries and module globals are the same before wrap, during, and after."""
    run(tiny_wan())  # what libraries set up by themselves at their first use
    before = [dict(vars(owner)) for owner in (*CLASSES, *LIBRARIES)]
    pipe = diffcache.wrap(tiny_wan(), policy)
    assert [dict(vars(owner)) for owner in (*CLASSES, *LIBRARIES)] == before
    run(pipe)
    assert [dict(vars(owner)) for owner in (*CLASSES, *LIBRARIES)] == before
    diffcache.unwrap(pipe)
    assert [dict(vars(owner)) for owner in (*CLASSES, *LIBRARIES)] == before


def test_scheduler_is_only_read(policy, tiny_wan, run):
    """Nothing is put on the scheduler, neither at wrap nor in a run."""
    pipe, twin = tiny_wan(), tiny_wan()
    before = {name: id(value) for name, value in vars(pipe.scheduler).items()}
    diffcache.wrap(pipe, policy)
    assert {name: id(value) for name, value in vars(pipe.scheduler).items()} == before
    run(pipe)
    run(twin)
    assert vars(pipe.scheduler).keys() == vars(twin.scheduler).keys()


def test_unwrap_twice_and_wrap_again(policy, tiny_wan, run, plain):
    """unwrap of something not wrapped does nothing; wrapping anew gives what it gave before."""
    pipe = diffcache.unwrap(tiny_wan())
    first = run(diffcache.wrap(pipe, policy))
    diffcache.unwrap(diffcache.unwrap(pipe))
    assert torch.equal(run(pipe), plain())
    assert torch.equal(run(diffcache.wrap(pipe, policy)), first)

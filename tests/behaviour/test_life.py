"""What else happens to a wrapped pipeline: errors inside the model, copies, files, other types."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from diffusers import WanTransformer3DModel
from tiny_pipelines import embeddings, two_experts
from toys import SITES, apart, lively, reused, rows

import diffcache

NAMES = ["hold", "first_block", "taylorseer", "balanced"]


@pytest.mark.peer_row(10)
@pytest.mark.parametrize("place", ["before the blocks", "in a block", "after the blocks"])
@pytest.mark.parametrize("site", SITES)
def test_an_error_inside_the_model(site, place, tiny_wan, run_tiny):
    """Out of memory in mid-step, one pass done and the other not: the next run is a fresh one."""
    policy = lively("hold", site=site)
    pipe = diffcache.wrap(tiny_wan(), policy)
    wan = pipe.transformer
    part = {"before": wan.condition_embedder, "in": wan.blocks[1], "after": wan.proj_out}
    calls = []

    def fail(module, args):
        calls.append(1)
        if len(calls) == 11:
            raise torch.OutOfMemoryError("as if")

    handle = part[place.split()[0]].register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError, match="as if"):
        run_tiny(pipe)
    handle.remove()
    assert type(wan.blocks[0]).__name__ == "WanTransformerBlock"  # nothing stands in their place
    assert torch.equal(run_tiny(pipe), run_tiny(diffcache.wrap(tiny_wan(), policy)))
    assert torch.equal(run_tiny(diffcache.unwrap(pipe)), run_tiny(tiny_wan()))


@pytest.mark.parametrize("name", NAMES)
def test_another_dtype_between_two_runs(name, tiny_wan, run_tiny):
    """bf16 after fp32 and back: each run as on a pipeline that was never wrapped before it."""
    pipe, path = diffcache.wrap(tiny_wan(), lively(name)), []
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        path.append(dtype)
        fresh = tiny_wan()
        for earlier in path:
            fresh.transformer.to(earlier)
        pipe.transformer.to(dtype)
        assert torch.equal(run_tiny(pipe), run_tiny(diffcache.wrap(fresh, lively(name))))
        assert reused(pipe) > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_is_not_wrapped(name, tiny_wan, run_tiny):
    """A deep copy of a wrapped transformer, made in mid-run too: plain, and ours goes on."""
    copies = []

    def duplicate(pipe, index, t, tensors):
        if index == 6:
            copies.append(copy.deepcopy(pipe.transformer))
        return tensors

    pipe = diffcache.wrap(tiny_wan(), lively(name))
    found = run_tiny(pipe, callback_on_step_end=duplicate)
    assert torch.equal(found, run_tiny(diffcache.wrap(tiny_wan(), lively(name))))
    plain = tiny_wan()
    plain.transformer = copies[0]
    assert torch.equal(run_tiny(plain), run_tiny(tiny_wan()))
    with pytest.raises(ValueError, match="not wrapped"):
        diffcache.report(plain)


def test_a_wrapped_model_is_saved_like_any_other(tiny_wan, run_tiny, tmp_path):
    """What is written knows nothing of us; what is loaded is not wrapped."""
    pipe, twin = diffcache.wrap(tiny_wan(), "first_block", threshold=0.5), tiny_wan()
    run_tiny(pipe)
    for name, one in (("ours", pipe), ("theirs", twin)):
        one.transformer.save_pretrained(tmp_path / name)
    files = [sorted(p.name for p in (tmp_path / name).iterdir()) for name in ("ours", "theirs")]
    assert files[0] == files[1]
    for file in files[0]:
        assert (tmp_path / "ours" / file).read_bytes() == (tmp_path / "theirs" / file).read_bytes()
    twin.transformer = WanTransformer3DModel.from_pretrained(tmp_path / "ours")
    assert torch.equal(run_tiny(twin), run_tiny(tiny_wan()))
    assert "forward" not in twin.transformer.__dict__


def test_weights_loaded_into_a_wrapped_model(tiny_wan, run_tiny):
    """load_state_dict between two runs: the next is that of the new weights."""
    pipe = diffcache.wrap(tiny_wan(seed=0), "hold")
    first = run_tiny(pipe)
    pipe.transformer.load_state_dict(tiny_wan(seed=1).transformer.state_dict())
    second = run_tiny(pipe)
    assert torch.equal(second, run_tiny(diffcache.wrap(tiny_wan(seed=1), "hold")))
    assert apart(second, first) > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_another_scheduler_between_two_runs(name, tiny_wan, run_tiny):
    """Set on the wrapped pipeline: each run as on a pipeline that was wrapped with it."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe, fresh = diffcache.wrap(tiny_wan(), lively(name)), tiny_wan()
    run_tiny(pipe)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    fresh.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    assert torch.equal(run_tiny(pipe), run_tiny(diffcache.wrap(fresh, lively(name))))
    assert reused(pipe) > 0


@pytest.mark.peer_row(6)
@pytest.mark.parametrize("strict", [False, True])
def test_an_exchanged_transformer_is_not_silently_plain(strict, tiny_wan, run_tiny):
    """pipe.transformer = another one, after wrap: said after the run, with what to do."""
    pipe, other = diffcache.wrap(tiny_wan(), "hold", strict=strict), tiny_wan(seed=1)
    pipe.transformer = other.transformer
    kind = pytest.raises(diffcache.DiffcacheError) if strict else nullcontext()
    with warnings.catch_warnings(record=True) as said, kind as raised:
        warnings.simplefilter("always")
        run_tiny(pipe)
    text = str(raised.value) if strict else " ".join(str(warning.message) for warning in said)
    assert "transformer was exchanged" in text and "wrap the pipeline again" in text
    with pytest.raises(ValueError, match="not wrapped"):
        diffcache.report(pipe)
    diffcache.wrap(pipe, "hold", strict=strict)
    expected = run_tiny(diffcache.wrap(tiny_wan(seed=1), "hold"))
    assert torch.equal(run_tiny(pipe), expected) and reused(pipe) > 0


def test_one_expert_unwrapped_by_itself_is_no_mistake(recwarn):
    """unwrap(pipe.transformer_2): the pipeline goes on with one expert cached, and says nothing."""
    pipe = diffcache.wrap(two_experts(), "hold")
    diffcache.unwrap(pipe.transformer_2)
    pipe(
        height=64,
        width=64,
        num_frames=5,
        num_inference_steps=24,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
        **embeddings(),
    )
    assert {row.module for row in rows(pipe)} == {"transformer"} and reused(pipe) > 0
    assert not [w for w in recwarn if w.category is diffcache.DiffcacheWarning]


def test_a_copied_pipeline_is_not_wrapped(tiny_wan, run_tiny):
    """deepcopy of the whole pipeline: the copy is plain, wraps by itself, and both go on."""
    pipe = diffcache.wrap(tiny_wan(), "hold")
    expected = run_tiny(pipe)
    copied = copy.deepcopy(pipe)
    assert torch.equal(run_tiny(copied), run_tiny(tiny_wan()))
    assert torch.equal(run_tiny(diffcache.wrap(copied, "hold")), expected)
    assert torch.equal(run_tiny(pipe), expected)

"""Two experts in one loop, as Wan 2.2 has them, or one of them."""

from __future__ import annotations

import pytest
import torch
from tiny_pipelines import embeddings, two_experts
from toys import lively, rows

import diffcache

BOUNDARY = 700  # timesteps from here up go to the first expert
NAMES = ["hold", "easycache", "first_block", "taylorseer", "balanced"]


def run(pipe, steps=24, **call):
    return pipe(
        height=64,
        width=64,
        num_frames=5,
        num_inference_steps=steps,
        guidance_scale=3.0,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
        **embeddings(),
        **call,
    ).frames


def rows_of(pipe, module, branch="cond"):
    return [row for row in rows(pipe, branch) if row.module == module]


@pytest.mark.peer_row(3)
@pytest.mark.parametrize("name", NAMES)
def test_each_expert_has_its_own_state(name):
    """diffusers #14025: MagCache counted all steps for each expert, which sees a part of them.

    Own step count, own warm-up, own tail; what one expert does is not seen by the other: with the
    other one not wrapped at all it decides the same.
    """
    pipe = diffcache.wrap(two_experts(), lively(name))
    run(pipe)
    policy = diffcache.get_policy(name)
    for module, high in (("transformer", True), ("transformer_2", False)):
        mine = rows_of(pipe, module)
        assert all((row.timestep >= BOUNDARY) == high for row in mine)
        assert [row.step for row in mine] == list(range(len(mine))) and 8 <= len(mine) < 24
        assert mine[0].decision == "compute"
        assert not policy.guards.tail_steps or mine[-1].decision == "compute"
        assert any(row.decision == "reuse" for row in mine), module
    first = [row.decision for row in rows_of(pipe, "transformer")]
    only = diffcache.wrap(two_experts(), {"transformer": lively(name)})
    run(only)
    assert [row.decision for row in rows_of(only, "transformer")] == first


@pytest.mark.peer_row(4)
@pytest.mark.parametrize("name", ["hold", "first_block", "balanced"])
@pytest.mark.parametrize("kind", ["14B", "5B", "low noise alone"])
def test_an_expert_may_be_missing(kind, name):
    """vllm-omni PR #1392: transformer_2 is None on Wan 2.2 5B, and the cache raised."""
    first, second, boundary = {
        "14B": (True, True, 0.7),
        "5B": (True, False, None),
        "low noise alone": (False, True, 1.0),
    }[kind]
    pipe = diffcache.wrap(two_experts(first, second, boundary), lively(name))
    out = run(pipe)
    found = set(diffcache.report(pipe).summary["modules"])
    assert found == {n for n, there in (("transformer", first), ("transformer_2", second)) if there}
    assert diffcache.report(pipe).summary["calls"] == 48
    assert torch.equal(run(pipe), out)
    plain = run(two_experts(first, second, boundary))
    assert torch.equal(run(diffcache.unwrap(pipe)), plain)


@pytest.mark.peer_row(5)
def test_settings_for_each_expert_by_name():
    """cache-dit #210: another warm-up for each expert. A mapping from names to policies."""
    policies = {
        "transformer": diffcache.get_policy("hold", warmup_steps=6),
        "transformer_2": diffcache.get_policy("hold", warmup_steps=1),
    }
    pipe = diffcache.wrap(two_experts(), policies)
    run(pipe)
    for name, warmup in (("transformer", 6), ("transformer_2", 1)):
        assert sum(row.reason == "warm-up" for row in rows_of(pipe, name)) == warmup
    with pytest.raises(ValueError, match=r"no denoiser is called 'transformer'.*transformer_2"):
        diffcache.wrap(two_experts(False), policies)


@pytest.mark.peer_row(5)
def test_one_expert_wrapped_again_by_itself():
    """wrap(pipe), then wrap(pipe.transformer_2, ...): the other keeps its policy and its name."""
    pipe = diffcache.wrap(two_experts(), "hold", warmup_steps=6)
    diffcache.wrap(pipe.transformer_2, "hold", warmup_steps=1)
    run(pipe)
    for name, warmup in (("transformer", 6), ("transformer_2", 1)):
        assert sum(row.reason == "warm-up" for row in rows_of(pipe, name)) == warmup
        assert len(rows_of(pipe, name)) == rows_of(pipe, name)[-1].step + 1
    both = diffcache.wrap(
        two_experts(),
        {"transformer": lively("hold", max_reuses=1), "transformer_2": lively("first_block")},
    )
    run(both)
    modules = diffcache.report(both).summary["modules"]
    assert [modules[name]["policy"] for name in modules] == ["hold", "first_block"]


@pytest.mark.peer_row(3)
@pytest.mark.parametrize("step", [4, 11, 20])
@pytest.mark.parametrize("name", ["hold", "balanced"])
def test_cancelled_in_either_part(name, step):
    """A callback that raises before, about and after the switch: the next run is a fresh one."""

    def cancel(pipe, index, t, tensors):
        if index == step:
            raise InterruptedError
        return tensors

    pipe = diffcache.wrap(two_experts(), lively(name))
    with pytest.raises(InterruptedError):
        run(pipe, callback_on_step_end=cancel)
    assert torch.equal(run(pipe), run(diffcache.wrap(two_experts(), lively(name))))


def test_experts_wrapped_by_themselves_before_their_pipeline():
    """Each has its name and its part of the steps, as if only the pipeline had been wrapped."""
    pipe, twin = two_experts(), diffcache.wrap(two_experts(), "balanced")
    for module in (pipe.transformer, pipe.transformer_2):
        diffcache.wrap(module, "hold")
    diffcache.wrap(pipe, "balanced")
    assert torch.equal(run(pipe), run(twin))
    for name in ("transformer", "transformer_2"):
        ours, theirs = (rows_of(each, name) for each in (pipe, twin))
        assert [row.decision for row in ours] == [row.decision for row in theirs] != []
    assert set(diffcache.report(pipe).summary["modules"]) == {"transformer", "transformer_2"}

"""Two experts in one loop (Wan 2.2), one of them, or the other."""

from __future__ import annotations

import pytest
import torch
from diffusers import WanPipeline

import diffcache

BOUNDARY = 0.7  # of 1000: of 16 steps at shift 2 about half go to each expert


@pytest.fixture
def experts(tiny_wan):
    """Makes a WanPipeline with two experts, or with either left out."""

    def make(first=True, second=True, boundary=BOUNDARY):
        one, two = tiny_wan(seed=0), tiny_wan(seed=1)
        pipe = WanPipeline(
            tokenizer=None,
            text_encoder=None,
            vae=None,
            scheduler=one.scheduler,
            transformer=one.transformer if first else None,
            transformer_2=two.transformer if second else None,
            boundary_ratio=boundary,
        )
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make


@pytest.fixture
def run22():
    """Runs such a pipeline for 24 steps from seeded noise."""

    def run(pipe, **call):
        generator = torch.Generator().manual_seed(0)
        return pipe(
            prompt_embeds=torch.randn(1, 6, 16, generator=generator),
            negative_prompt_embeds=torch.randn(1, 6, 16, generator=generator),
            latents=torch.randn(1, 4, 2, 8, 8, generator=generator),
            height=64,
            width=64,
            num_frames=5,
            num_inference_steps=24,
            guidance_scale=3.0,
            output_type="latent",
            **call,
        ).frames

    return run


def rows_of(pipe, name):
    return [row for row in diffcache.report(pipe).rows if row.module == name]


@pytest.mark.peer_row(3)
def test_two_experts(policy, experts, run22, skips):
    """Each has its own warm-up and tail; nothing crosses the switch; twice the same."""
    pipe = diffcache.wrap(experts(), policy)
    out = run22(pipe)
    assert torch.equal(run22(pipe), out)
    for name in ("transformer", "transformer_2"):
        rows = rows_of(pipe, name)
        high = [row.timestep >= BOUNDARY * 1000 for row in rows]
        assert rows and all(high) if name == "transformer" else not any(high)
        cond = [row for row in rows if row.branch == "cond"]
        warmup, tail = (policy.settings()[key] for key in ("warmup_steps", "tail_steps"))
        assert [row.step for row in cond] == list(range(len(cond))) and len(cond) >= 8
        assert {row.decision for row in cond[:warmup]} == {"compute"}
        assert not tail or cond[-1].decision == "compute"
        assert any(row.decision == "reuse" for row in cond) == skips(policy)
    assert diffcache.report(pipe).summary["modules"].keys() == {"transformer", "transformer_2"}


def test_two_experts_exact(exact_policy, experts, run22):
    """Exact settings are exact, and unwrap takes both off."""
    expected = run22(experts())
    pipe = diffcache.wrap(experts(), exact_policy)
    assert torch.equal(run22(pipe), expected)
    diffcache.unwrap(pipe)
    assert torch.equal(run22(pipe), expected)
    assert "forward" not in pipe.transformer_2.__dict__


@pytest.mark.peer_row(3)
def test_history_of_the_first_expert_is_freed_at_the_switch(policy, experts, run22, ledgers):
    """Once the second expert runs, the first holds nothing."""
    pipe, seen = diffcache.wrap(experts(), policy), []

    def callback(pipe, index, t, tensors):
        first, second = (state.store.bytes_held for state in ledgers(pipe))
        seen.append((bool(t >= BOUNDARY * 1000), first, second))
        return tensors

    run22(pipe, callback_on_step_end=callback)
    last_high = max(i for i, (high, _, _) in enumerate(seen) if high)
    assert all(first == 0 for _, first, _ in seen[last_high:])
    assert all(second == 0 for _, _, second in seen[: last_high + 1])
    assert seen[-1][1:] == (0, 0)


@pytest.mark.peer_row(4)
@pytest.mark.parametrize("missing", ["transformer", "transformer_2"])
def test_one_expert_is_none(policy, experts, run22, missing, skips):
    """Wan 2.2 5B has no transformer_2; a low-noise pipeline no transformer."""
    boundary = None if missing == "transformer_2" else 1.0
    pipe = experts(missing != "transformer", missing != "transformer_2", boundary)
    plain = run22(pipe)
    diffcache.wrap(pipe, policy)
    run22(pipe)
    report = diffcache.report(pipe)
    assert missing not in report.summary["modules"] and report.summary["calls"] == 48
    assert any(row.decision == "reuse" for row in report.rows) == skips(policy)
    diffcache.wrap(pipe, policy, **policy.exact)
    assert torch.equal(run22(pipe), plain)
    assert torch.equal(run22(diffcache.unwrap(pipe)), plain)


@pytest.mark.peer_row(5)
def test_a_policy_for_each_expert(experts, run22):
    """A mapping from denoiser names; one left out is not wrapped."""
    pipe = diffcache.wrap(experts(), {"transformer": "first_block", "transformer_2": "hold"})
    run22(pipe)
    modules = diffcache.report(pipe).summary["modules"]
    assert modules["transformer"]["policy"] == "first_block"
    assert modules["transformer_2"]["policy"] == "hold"
    assert {row.site for row in rows_of(pipe, "transformer_2")} == {"model"}
    only = diffcache.wrap(experts(), {"transformer_2": "hold"})
    run22(only)
    assert not rows_of(only, "transformer") and "forward" not in only.transformer.__dict__
    with pytest.raises(ValueError, match="transformer_3"):
        diffcache.wrap(experts(), {"transformer_3": "hold"})


@pytest.mark.peer_row(5)
def test_warmup_differs_per_expert(experts, run22):
    """Settings of one expert do not reach the other."""
    policies = {
        "transformer": diffcache.get_policy("hold", warmup_steps=6),
        "transformer_2": diffcache.get_policy("hold", warmup_steps=1),
    }
    pipe = diffcache.wrap(experts(), policies)
    run22(pipe)
    for name, warmup in (("transformer", 6), ("transformer_2", 1)):
        cond = [row for row in rows_of(pipe, name) if row.branch == "cond"]
        assert sum(row.reason == "warm-up" for row in cond) == warmup


def test_cancelled_between_the_experts(policy, experts, run22):
    """Cancelled in the first expert's part, then in the second's; the next run is fresh."""
    pipe = diffcache.wrap(experts(), policy)
    expected = run22(diffcache.wrap(experts(), policy))
    for step in (4, 20):

        def cancel(pipe, index, t, tensors, step=step):
            if index == step:
                raise InterruptedError
            return tensors

        with pytest.raises(InterruptedError):
            run22(pipe, callback_on_step_end=cancel)
        assert torch.equal(run22(pipe), expected)

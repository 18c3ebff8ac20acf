"""Exact settings give the very bits of the same configuration without us."""

from __future__ import annotations

import copy

import pytest
import torch

import diffcache


def test_every_policy_names_exact_settings(exact_policy):
    """`exact` names settings that the policy has."""
    assert exact_policy.exact and exact_policy.exact.keys() <= exact_policy.settings().keys()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_exact_is_bit_identical(exact_policy, tiny_wan, run, plain, reused, guidance, batch):
    """Guidance on and off, one clip and two, twice in a row."""
    expected = plain(guidance=guidance, batch=batch)
    pipe = diffcache.wrap(tiny_wan(), exact_policy)
    for _ in range(2):
        assert torch.equal(run(pipe, guidance=guidance, batch=batch), expected)
    assert reused(pipe) == 0


@pytest.mark.peer_row(17)
@pytest.mark.parametrize("first", ["wrap", "offload"])
def test_exact_under_model_offload(exact_policy, tiny_wan, run, plain, first):
    """enable_model_cpu_offload before or after wrap."""
    expected = plain()
    pipe = tiny_wan()
    if first == "wrap":
        diffcache.wrap(pipe, exact_policy)
    pipe.enable_model_cpu_offload(device="cpu")
    if first == "offload":
        diffcache.wrap(pipe, exact_policy)
    for _ in range(2):
        assert torch.equal(run(pipe), expected)
    assert diffcache.report(pipe).summary["calls"] == 18


@pytest.mark.peer_row(17)
@pytest.mark.parametrize("first", ["wrap", "offload"])
def test_offload_order_makes_no_difference(policy, tiny_wan, run, first, reused, skips):
    """A skipping policy under model offload skips as it does without."""
    expected = run(diffcache.wrap(tiny_wan(), policy))
    pipe = tiny_wan()
    if first == "wrap":
        diffcache.wrap(pipe, policy)
    pipe.enable_model_cpu_offload(device="cpu")
    if first == "offload":
        diffcache.wrap(pipe, policy)
    for _ in range(2):
        assert torch.equal(run(pipe), expected)
    assert bool(reused(pipe)) == skips(policy)


@pytest.fixture(scope="module")
def dynamo():
    """Dynamo's caches, shared by the tests of this file and emptied after them."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.peer_row(16)
@pytest.mark.parametrize("first", ["wrap", "compile"])
def test_exact_under_compiled_blocks(exact_policy, tiny_wan, run, dynamo, first):
    """compile_repeated_blocks before or after wrap gives what it gives alone."""
    expected = run(compiled(tiny_wan()), steps=8)
    pipe = tiny_wan()
    if first == "wrap":
        diffcache.wrap(pipe, exact_policy)
    compiled(pipe)
    if first == "compile":
        diffcache.wrap(pipe, exact_policy)
    assert torch.equal(run(pipe, steps=8), expected)
    assert diffcache.report(pipe).summary["calls"] == 16


def compiled(pipe):
    """Each block under torch.compile with the eager backend."""
    for block in pipe.transformer.blocks:
        block.compile(backend="eager")
    return pipe


def test_exact_on_the_demo_model(exact_policy, loaded_demo, run_demo, demo_plain):
    """The trained pipeline in the exact setting."""
    pipe = diffcache.wrap(copy.deepcopy(loaded_demo), exact_policy)
    assert torch.equal(run_demo(pipe), demo_plain)


def test_policies_skip_on_the_demo_model(policy, loaded_demo, run_demo, demo_plain, reused, skips):
    """The trained pipeline: steps are skipped, nothing is kept, unwrap is complete."""
    pipe = diffcache.wrap(copy.deepcopy(loaded_demo), policy)
    output = run_demo(pipe)
    assert bool(reused(pipe)) == skips(policy)
    assert output.shape == demo_plain.shape and torch.isfinite(output).all()
    assert diffcache.report(pipe).summary["bytes_held"] == 0
    assert torch.equal(run_demo(diffcache.unwrap(pipe)), demo_plain)

"""Weights that change between runs and within one."""

from __future__ import annotations

import pytest
import torch

import diffcache


@pytest.mark.peer_row(31)
@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("name", ["hold", "first_block", "taylorseer"])
def test_weights_may_change_before_and_between_runs(name, when, tiny_wan, run_tiny):
    """Comfy-WaveSpeed #36: a LoRA had to come before the cache.

    As fusing a LoRA does: the next run is that of the changed model; back again too.
    """

    def fuse(pipe, scale):
        for block in pipe.transformer.blocks:
            block.attn1.to_q.weight.data.add_(scale * torch.eye(24))

    changed = tiny_wan()
    fuse(changed, 0.5)
    plain = run_tiny(changed)
    expected = run_tiny(diffcache.wrap(changed, name))
    pipe = diffcache.wrap(tiny_wan(), name)
    first = run_tiny(pipe) if when == "between" else None
    fuse(pipe, 0.5)
    assert torch.equal(run_tiny(pipe), expected)
    if first is not None:
        assert not torch.equal(first, expected)
    assert torch.equal(run_tiny(diffcache.unwrap(pipe)), plain)

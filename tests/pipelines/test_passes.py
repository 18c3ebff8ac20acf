"""Passes that leave keys and values behind are told by what the forward is given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import diffcache
from diffcache.pipelines.passes import writes_kv

CACHE = {0: torch.zeros(2)}


@pytest.mark.parametrize(
    ("arguments", "timestep", "expected"),
    [
        ({"kv_cache_flag": {"is_cache_step": True}}, 0.0, True),
        ({"kv_cache_flag": {"is_cache_step": False}, "kv_cache": CACHE}, 0.0, False),
        ({"kv_cache_mode": "capture_pre_rope"}, 0.0, True),
        ({"kv_cache_mode": "inject_and_capture_post_rope"}, 0.0, True),
        ({"kv_cache_mode": "inject", "kv_cache": CACHE}, 0.0, False),
        ({"kv_cache_mode": "extract"}, 999.0, True),
        ({"kv_cache_mode": "cached"}, 999.0, False),
        ({"updating_cache": True}, 500.0, True),
        ({"updating_cache": False, "kv_cache": CACHE}, 0.0, False),
        ({"kv_cache": CACHE}, torch.zeros(1, 3), True),
        ({"kv_cache": CACHE}, torch.tensor([[0.0, 0.0, 250.0]]), False),
        ({"kv_cache": None}, 0.0, False),
        ({"kv_cache": CACHE}, None, False),
        ({}, 0.0, False),
    ],
)
def test_which_calls_write(arguments, timestep, expected):
    """Flags decide where there are any; else a cache handed in at a clean timestep."""
    assert writes_kv(arguments, timestep) is expected


def test_context_noise():
    """Clean frames may be encoded with a little noise."""
    assert writes_kv({"kv_cache": CACHE}, 20.0, context_noise=20.0)
    assert not writes_kv({"kv_cache": CACHE}, 21.0, context_noise=20.0)


class Writer(nn.Module):
    """Hands its cache back beside the sample, and writes into it at timestep 0."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x, timestep, kv_cache=None):
        if timestep == 0:
            kv_cache[0].add_(x.mean())
        return x * self.weight + timestep / 1000, kv_cache


def test_a_clean_pass_by_itself():
    """A model of one's own with a `kv_cache`: each clean pass writes, none of them is a step."""
    cache, x = {0: torch.zeros(1)}, torch.ones(1, 3)
    model = diffcache.wrap(Writer(), "hold", min_steps=0, site="model")
    for time in (900.0, 800.0, 700.0, 600.0, 500.0, 0.0, 0.0):
        model(x, time, cache)
    rows = diffcache.report(model).rows
    assert [row.reason for row in rows if row.timestep == 0] == ["kv_write"] * 2
    assert cache[0].item() == 2.0
    assert any(row.decision == "reuse" for row in rows)


def test_a_cache_comes_back_as_it_was_given():
    """A reused call returns this call's own cache, and none of it is kept in the history."""
    big = {0: torch.zeros(1000)}
    model = diffcache.wrap(Writer(), "hold", min_steps=0, site="model")
    for time in (900.0, 800.0, 700.0, 600.0, 500.0):
        given = dict(big)
        _, returned = model(torch.ones(1, 3), time, given)
        assert returned is given
    report = diffcache.report(model)
    assert any(row.decision == "reuse" for row in report.rows)
    assert report.summary["bytes_peak"] < 1000

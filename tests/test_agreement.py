"""Which ranks decide together, and what they exchange; real ranks: tests/behaviour."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import diffcache
from diffcache.agreement import Ranks, sharing
from diffcache.features.guards import Guards


@pytest.fixture
def one_rank(tmp_path):
    """This process as the only rank of a gloo world."""
    store = (tmp_path / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", ["auto", "world", "alone", "anything"])
def test_a_process_of_its_own_decides_alone(ranks):
    """Nothing is initialised: no group is asked for, whatever the setting."""
    assert sharing(nn.Linear(1, 1), ranks) is None


def test_a_world_of_one_decides_alone(one_rank):
    """A group of one has nobody to wait for; an unknown name is an error all the same."""
    assert sharing(nn.Linear(1, 1), "world") is None
    assert sharing(nn.Linear(1, 1), dist.group.WORLD.group_name) is None
    with pytest.raises(ValueError, match="no process group is called 'nobody'"):
        sharing(nn.Linear(1, 1), "nobody")


def test_a_module_that_is_not_spread_decides_alone(one_rank):
    """Data parallelism: torch.distributed runs, but this module is whole."""
    assert sharing(nn.Linear(1, 1), "auto") is None
    module = nn.Linear(1, 1)
    module._parallel_config = SimpleNamespace(context_parallel_config=None)
    assert sharing(module, "auto") is None


@pytest.mark.parametrize("kind", ["context", "tensor"])
def test_the_group_of_a_spread_module(one_rank, monkeypatch, kind):
    """The mesh that diffusers' enable_parallelism leaves on the module, and under torch.compile."""
    mesh = SimpleNamespace(get_group=lambda: "the group")
    module, compiled = nn.Linear(1, 1), nn.Module()
    config = {"context": "_flattened_mesh", "tensor": "_mesh"}[kind]
    part = SimpleNamespace(**{config: mesh})
    module._parallel_config = SimpleNamespace(**{f"{kind}_parallel_config": part})
    compiled._orig_mod = module
    monkeypatch.setattr(dist, "get_world_size", lambda group: {"the group": 2}[group])
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    for one in (module, compiled):
        assert isinstance(sharing(one, "auto"), Ranks)
        assert sharing(one, "alone") is None


def test_the_worst_counts(one_rank):
    """NaN is as bad as infinity; order is kept."""
    ranks = Ranks([dist.group.WORLD])
    assert ranks.worst([1.0, math.nan, -2.0]) == [1.0, math.inf, -2.0]
    assert ranks.any(True) and not ranks.any(False)


def test_a_ranks_own_part(one_rank, monkeypatch):
    """Of a tensor split along one dimension; None where the shapes tell of no such split."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    ranks, whole = Ranks([dist.group.WORLD]), torch.arange(24.0).reshape(1, 6, 4)
    assert torch.equal(ranks.part(whole, torch.Size((1, 3, 4))), whole[:, 3:])
    for shape in ((1, 6, 4), (1, 2, 4), (1, 3, 2), (6, 4)):
        assert ranks.part(whole, torch.Size(shape)) is None


@pytest.mark.parametrize("ranks", ["", None, 3])
def test_the_setting_is_a_name(ranks):
    """It travels in a policy file, so it cannot be the group itself."""
    with pytest.raises(ValueError, match="ranks must be 'auto', 'world', 'alone'"):
        Guards(ranks=ranks)
    policy = diffcache.get_policy("hold", ranks="world")
    assert diffcache.Policy.from_dict(policy.to_dict()).guards.ranks == "world"

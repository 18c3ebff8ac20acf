"""One of two processes that work on one video; run by test_distributed.py, prints what it saw.

Each model call holds a collective, as under sequence parallelism: were one rank to skip a part that
the other computes, both would wait until the time limit.
"""

from __future__ import annotations

import datetime
import json
import math
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from toys import COND, TIMES, TINY_WAN, Bare, fill_zeros, lively, rows, start

import diffcache

LIMIT = datetime.timedelta(seconds=60)
POLICIES = ("first_block", "easycache", "balanced", "hold", "taylorseer")


class Joined(nn.Module):
    """A block whose output needs every rank's part, as attention over a split sequence does."""

    def __init__(self, block, group):
        super().__init__()
        self.block, self.group = block, group

    def forward(self, hidden_states, text):
        out = self.block(hidden_states, text)
        if self.group is not None:
            mean = out.mean(1, keepdim=True)
            dist.all_reduce(mean, group=self.group)
            out = out + 0.01 * mean
        return out


def split(group):
    """The toy denoiser with a collective in each block; none without a group."""
    module = Bare()
    module.layers = nn.ModuleList(Joined(block, group) for block in module.layers)
    return module


def run(module, rank, spoiled=None, steps=12):
    """Each rank's own tokens move at its own pace; at step `spoiled` rank 1 sees a NaN."""
    x = start(1, 5, 6, seed=rank)
    for i, t in enumerate(TIMES[:steps]):
        given = x * (1 - (0.002, 0.05)[rank] * i * (i % 3))
        if i == spoiled and rank:
            given[0, 0, 0] = math.nan
        module(given, t, COND)
    return [(row.decision, row.reason) for row in rows(module)]


def policy(name, **settings):
    """With thresholds that one rank's metrics pass sooner than the other's."""
    tight = {"threshold": 0.05} if name in ("first_block", "easycache") else {}
    return lively(name).with_settings(**{**tight, **settings})


def forced_apart(rank, group):
    """Decisions of every policy: with the ranks agreed, and of the same inputs without."""
    found = {}
    for name in POLICIES:
        front = 1 if name == "first_block" else 0
        for site in ({"kind": "stack", "front": front}, {"kind": "block"}, {"kind": "model"}):
            if name == "first_block" and site["kind"] == "model":
                continue
            shared = diffcache.wrap(split(group), policy(name, site=site, ranks="world"))
            alone = diffcache.wrap(split(None), policy(name, site=site, ranks="alone"))
            found[f"{name} {site['kind']}"] = {
                "shared": run(shared, rank),
                "alone": run(alone, rank),
            }
    return found


def not_finite(rank, group):
    """A NaN on rank 1 alone, under a table that needs no metric."""
    found = {}
    for site in ("stack", "block", "model"):
        module = diffcache.wrap(split(None), lively("hold", site=site, ranks="world"))
        alone = diffcache.wrap(split(None), lively("hold", site=site, ranks="alone"))
        found[site] = {"shared": run(module, rank, 4), "alone": run(alone, rank, 4)}
    return found


def orders(rank, group):
    """Which orders an adaptive predictor has come to prefer."""
    module = diffcache.wrap(split(group), policy("balanced", ranks="world", max_error=None))
    run(module, rank)
    state = module.__dict__["_diffcache"]
    return [sorted(cell.numbers.items()) for cell in state.cells.values()]


def named(rank, group):
    """A group of one's own, given by its name; and a name that no group has."""
    part = dist.new_group([0, 1])
    found = run(diffcache.wrap(split(part), policy("first_block", ranks=part.group_name)), rank)
    try:
        run(diffcache.wrap(split(None), policy("first_block", ranks="nobody")), rank)
        refused = ""
    except ValueError as error:
        refused = str(error)
    return {"decisions": found, "refused": refused}


def data_parallel(rank, group):
    """Different videos and numbers of calls, nothing shared: rank 1 stops early."""
    module = diffcache.wrap(split(None), policy("first_block"))
    return run(module, rank, steps=12 - 5 * rank)


def context_parallel(rank, group):
    """diffusers' own context parallelism over a Wan transformer, enabled before and after wrap."""
    from diffusers import ContextParallelConfig, WanTransformer3DModel

    torch.accelerator.device_count = lambda: 1  # diffusers counts accelerators, even for gloo
    found = {}
    for name, settings in SPREAD.items():
        for first in ("wrap", "parallel", "plain"):
            torch.manual_seed(0)
            wan = fill_zeros(WanTransformer3DModel(**TINY_WAN))
            if first != "parallel":
                diffcache.wrap(wan, policy(name.split()[0], **settings))
            if first != "plain":
                wan.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
            if first == "parallel":
                diffcache.wrap(wan, policy(name.split()[0], **settings))
            found[f"{name}, {first}"] = moving(wan)
    return found


def moving(wan):
    """12 calls in which the second half of the tokens, rank 1's, moves more than the first."""
    x, text = start(1, 4, 2, 8, 8), start(1, 6, 16, seed=1)
    pace = torch.tensor([0.001, 0.02]).reshape(1, 1, 2, 1, 1)
    sums = []
    for i, t in enumerate(TIMES):
        out = wan(x * (1 - pace * i), torch.tensor([t]), text, return_dict=False)[0]
        sums.append(float(out.double().abs().sum()))
    return {
        "decisions": [(row.decision, row.reason) for row in rows(wan)],
        "metrics": [row.metric for row in rows(wan)],
        "sums": sums,
    }


SPREAD = {
    "first_block": {"threshold": 0.067},  # between the two ranks' metrics at the fourth step
    "hold stack": {"site": {"kind": "stack", "front": 1}},
    "hold block": {"site": "block"},
    "balanced": {},
}


def sharded_weights(rank, group):
    """FSDP over the blocks, each rank with a video of its own: gathering weights is collective."""
    mesh = init_device_mesh("cpu", (2,))
    module = Bare().requires_grad_(True)
    for part in (*module.layers, module):
        fully_shard(part, mesh=mesh)
    return run(diffcache.wrap(module, policy("first_block")), rank)


CASES = (forced_apart, not_finite, orders, named, data_parallel, sharded_weights, context_parallel)


def main(rank: int, store: Path, result: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=store.as_uri(), rank=rank, world_size=2, timeout=LIMIT
    )
    with torch.no_grad():
        found = {case.__name__: case(rank, dist.group.WORLD) for case in CASES}
    result.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))

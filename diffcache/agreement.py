"""Ranks that work on one video decide as one.

Under context or tensor parallelism, and where weights are sharded (FSDP), each forward holds
collectives that all ranks must reach: where one rank skips what another computes, both wait for
ever. Every rank sees other numbers (its own part of the tokens, or its own video), so the ranks
exchange one: whoever must compute makes all compute. Ranks that hold whole copies of the denoiser
and work on different videos (data parallelism) are never asked: they call as often as they like.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

NO_GROUP = "no process group is called {!r}: give 'auto', 'world', 'alone' or a group's group_name"


class Ranks:
    """Process groups whose ranks make the same calls in the same order."""

    def __init__(self, groups: Sequence[Any]) -> None:
        self._groups = groups
        # gloo and MPI reduce on the host; the others where their accelerator is.
        host = {"gloo", "mpi"}.issuperset(map(dist.get_backend, groups))
        accelerator = None if host else torch.accelerator.current_accelerator()
        self._device = "cpu" if accelerator is None else str(accelerator)

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank. A collective: all ranks have to ask."""
        return self.worst([float(flag)])[0] > 0

    def worst(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks; NaN counts as infinite. A collective."""
        known = [math.inf if math.isnan(value) else value for value in values]
        shared = torch.tensor(known, dtype=torch.float32, device=self._device)
        for group in self._groups:
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=group)
        found: list[float] = shared.tolist()
        return found

    def part(self, whole: Tensor, shape: torch.Size) -> Tensor | None:
        """This rank's part, of the given shape, of a tensor split along one dimension."""
        if whole.dim() != len(shape):
            return None
        split = [d for d in range(whole.dim()) if whole.shape[d] != shape[d]]
        for group in self._groups:
            size = dist.get_world_size(group)
            if len(split) == 1 and whole.shape[split[0]] == size * shape[split[0]]:
                return whole.chunk(size, split[0])[dist.get_rank(group)]
        return None


def sharing(module: nn.Module, ranks: str) -> Ranks | None:
    """The ranks that have to decide as one about `module`; None where this process decides alone.

    Args:
        ranks: "auto", "world", "alone" or a group's name, as in `Guards`.

    Raises:
        ValueError: there is no process group of that name.
    """
    if ranks == "alone" or not dist.is_available() or not dist.is_initialized():
        return None
    found = _spread(module) if ranks == "auto" else iter([_named_group(ranks)])
    groups = [group for group in dict.fromkeys(found) if dist.get_world_size(group) > 1]
    return Ranks(groups) if groups else None


def _spread(module: nn.Module) -> Iterator[Any]:
    """The groups over which the tokens or the weights of this module are spread."""
    parallel = getattr(getattr(module, "_orig_mod", module), "_parallel_config", None)
    # Left there by diffusers' enable_parallelism.
    context = getattr(parallel, "context_parallel_config", None)
    tensor = getattr(parallel, "tensor_parallel_config", None)
    for mesh in (getattr(context, "_flattened_mesh", None), getattr(tensor, "_mesh", None)):
        if mesh is not None:
            yield mesh.get_group()
    yield from _sharded(module)


def _sharded(module: nn.Module) -> Iterator[Any]:
    """The groups that hold shards of one parameter; replicas of it stay out."""
    from torch.distributed.tensor import DTensor

    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            for dim, placement in enumerate(parameter.placements):
                if placement.is_shard():
                    yield parameter.device_mesh.get_group(dim)
            return


def _named_group(name: str) -> Any:
    if name == "world":
        return dist.group.WORLD
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, LookupError, ValueError) as error:
        raise ValueError(NO_GROUP.format(name)) from error

"""Ranks that work on one video decide as one.

Under context or tensor parallelism each forward holds collectives that all ranks must reach: where
one rank skips what another computes, both wait for ever. Every rank sees other numbers (its own
part of the tokens), so the ranks exchange one: whoever must compute makes all compute. Ranks that
work on different videos (data parallelism) are never asked: they call as often as they like.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

NO_GROUP = "no process group is called {!r}: give 'auto', 'world', 'alone' or a group's group_name"


class Ranks:
    """A process group whose ranks make the same calls in the same order."""

    def __init__(self, group: Any) -> None:
        self._group = group
        # gloo and MPI reduce on the host; the others where their accelerator is.
        host = dist.get_backend(group) in ("gloo", "mpi") or not torch.accelerator.is_available()
        self._device = "cpu" if host else str(torch.accelerator.current_accelerator())

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank. A collective: all ranks have to ask."""
        return self.worst([float(flag)])[0] > 0

    def worst(self, values: list[float]) -> list[float]:
        """The largest of each value over all ranks; NaN counts as infinite. A collective."""
        known = [math.inf if math.isnan(value) else value for value in values]
        shared = torch.tensor(known, dtype=torch.float32, device=self._device)
        dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self._group)
        found: list[float] = shared.tolist()
        return found

    def part(self, whole: Tensor, shape: torch.Size) -> Tensor | None:
        """This rank's part, of the given shape, of a tensor split along one dimension."""
        size, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        if whole.dim() != len(shape):
            return None
        split = [d for d in range(whole.dim()) if whole.shape[d] != shape[d]]
        if len(split) != 1 or whole.shape[split[0]] != size * shape[split[0]]:
            return None
        return whole.chunk(size, split[0])[rank]


def sharing(module: nn.Module, ranks: str) -> Ranks | None:
    """The ranks that have to decide as one about `module`; None where this process decides alone.

    Args:
        ranks: "auto", "world", "alone" or a group's name, as in `Guards`.

    Raises:
        ValueError: there is no process group of that name.
    """
    if ranks == "alone" or not dist.is_available() or not dist.is_initialized():
        return None
    group = _mesh_group(module) if ranks == "auto" else _named_group(ranks)
    return None if group is None or dist.get_world_size(group) < 2 else Ranks(group)


def _mesh_group(module: nn.Module) -> Any:
    """The group over which diffusers' `enable_parallelism` has spread this module, if it has."""
    inner = getattr(module, "_orig_mod", module)
    parallel = getattr(inner, "_parallel_config", None)
    context = getattr(parallel, "context_parallel_config", None)
    tensor = getattr(parallel, "tensor_parallel_config", None)
    mesh = getattr(context, "_flattened_mesh", None) or getattr(tensor, "_mesh", None)
    return None if mesh is None else mesh.get_group()


def _named_group(name: str) -> Any:
    if name == "world":
        return dist.group.WORLD
    try:
        return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, LookupError, ValueError) as error:
        raise ValueError(NO_GROUP.format(name)) from error

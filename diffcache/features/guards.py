"""Guards: each can only force a full computation."""

from __future__ import annotations

from dataclasses import dataclass

from ..context import CallContext
from ..parts import check_count, check_range
from .base import Part, part
from .cell import Cell


@part("guards")
@dataclass(frozen=True, kw_only=True)
class Guards(Part):
    """When to compute whatever the gate says.

    Attributes:
        warmup_steps: computed steps at the start of each trajectory, per branch.
        tail_steps: computed steps at its end, where the length of the run is known.
        max_reuses: most reuses in a row.
        min_steps: runs shorter than this are computed in full; 0 forces caching on short runs.
        max_error: relative L1 error of the last checked prediction above which the next step is
            computed.
        ranks: which processes compute as soon as one of them must: "auto" those over which the
            denoiser is spread (diffusers' enable_parallelism, fully_shard), "world" all (where a
            loop of one's own shards), "alone" none, or a process group's `group_name`.
    """

    warmup_steps: int = 1
    tail_steps: int = 0
    max_reuses: int | None = None
    min_steps: int = 8
    max_error: float | None = None
    ranks: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.ranks, str) or not self.ranks:
            raise ValueError(
                "ranks must be 'auto', 'world', 'alone' or a process group's group_name, "
                f"got {self.ranks!r}"
            )
        super().__post_init__()
        check_count("warmup_steps", self.warmup_steps, 0)
        check_count("tail_steps", self.tail_steps, 0)
        check_count("min_steps", self.min_steps, 0)
        if self.max_reuses is not None:
            check_count("max_reuses", self.max_reuses, 0)
        if self.max_error is not None:
            check_range("max_error", self.max_error, 0)

    def reason(self, context: CallContext, cell: Cell) -> str | None:
        """Why this call must be computed, or None."""
        if context.ambiguous:
            return "ambiguous branch"
        steps = cell.policy.axis == "step"
        if steps and context.num_steps is not None and context.num_steps < self.min_steps:
            return f"{context.num_steps} steps are fewer than {self.min_steps}"
        if steps and context.branch_step < self.warmup_steps:
            return "warm-up"
        if steps and context.steps_left is not None and context.steps_left < self.tail_steps:
            return "tail"
        if not cell.history:
            return "no history"
        if self.max_reuses is not None and cell.reuses_in_a_row >= self.max_reuses:
            return "too many reuses in a row"
        if not cell.finite():
            return "non-finite history"
        if self.max_error is not None and not cell.numbers.get("error", 0.0) <= self.max_error:
            return "observed error"  # a NaN too
        return None

"""What scorers, budgets, protection and compressors see of one layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the host knows of a layer's attention.

    Attributes:
        layer, num_layers: counted over the layers that are compressed.
        rotate: rotates [batch, heads, n, head_dim] as queries at positions [axes, batch, n], or
            back where the third argument is true; None where the host cannot say.
        output_weight: gives the output projection [query heads, head_dim, hidden]; None where
            the host cannot say.
    """

    layer: int = 0
    num_layers: int = 1
    rotate: Callable[[Tensor, Tensor, bool], Tensor] | None = None
    output_weight: Callable[[], Tensor] | None = None

    def __deepcopy__(self, memo: object) -> Facts:
        return self  # a copy of a cache is of the same model


@dataclass(frozen=True, kw_only=True)
class LayerView:
    """One layer at the moment it is compressed.

    Attributes:
        keys, values: [batch, heads, slots, head_dim] as attention saw them, keys rotated. Where
            the host expands what it stores (latents), heads are those after expansion.
        index: int64 [batch, heads or 1, slots], the column of each slot's token; -1 for none.
        stored_heads: how many heads are stored.
        queries: [batch, query heads, n, head_dim], the last queries that the scorer asked for,
            rotated; query_index int64 [batch, n] their columns, -1 for padding.
        received: fp32 [batch, stored heads, slots], attention received so far; None if not asked.
        scaling: of the logits.
        timeline: tables over columns.
        facts: what the host knows.
    """

    keys: Tensor
    values: Tensor
    index: Tensor
    stored_heads: int
    queries: Tensor
    query_index: Tensor
    received: Tensor | None
    scaling: float
    timeline: Timeline
    facts: Facts

    @property
    def live(self) -> Tensor:
        """bool [batch, heads or 1, slots]: slots that hold a token."""
        return self.index >= 0

    @property
    def positions(self) -> Tensor:
        """int64 [axes, batch, heads or 1, slots]; 0 for slots that hold no token."""
        assert self.timeline.positions is not None
        return torch.stack([self.per_token(axis) for axis in self.timeline.positions]).long()

    @property
    def order(self) -> Tensor:
        """int64 [batch, heads or 1, slots]: how many real tokens came before; -1 for none."""
        assert self.timeline.real is not None
        count = self.timeline.real.cumsum(1) - 1
        return self.per_token(count).where(self.live, -1)

    @property
    def seen(self) -> Tensor:
        """int64 [batch]: real tokens ever seen."""
        return self.timeline.seen()

    def per_token(self, table: Tensor) -> Tensor:
        """A table [batch, columns] read at each slot: [batch, heads or 1, slots]."""
        rows = table[:, None].expand(-1, self.index.shape[1], -1)
        return rows.gather(-1, self.index.clamp(min=0))

    def by_stored_head(self, scores: Tensor) -> Tensor:
        """Scores [batch, heads, slots] averaged over the heads that one stored head serves."""
        if scores.shape[1] == self.stored_heads:
            return scores
        return scores.reshape(scores.shape[0], self.stored_heads, -1, scores.shape[2]).mean(2)

    def with_queries(self, queries: Tensor, query_index: Tensor) -> LayerView:
        return replace(self, queries=queries, query_index=query_index)

"""One compressed layer: appends, masks by true columns, scores, and keeps to its budget."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DiffcacheError
from . import attention
from .base import Event
from .layer_view import Facts, LayerView
from .masks import layer_mask
from .merging import edits, summary
from .plan import Plan
from .policy import KVPolicy
from .shares import Shares
from .timeline import Timeline
from .token_store import TokenStore

Row = dict[str, object]


class CompressedLayer:
    """Tokens of one layer of one cache, and what its policy makes of them.

    For each forward pass the host extends the timeline, then in each layer calls `append`, runs
    attention over what that gives under `mask`, and calls `attended`.

    Attributes:
        columns: how many columns this layer ever saw, padding and evicted ones included.
        rows: what happened at each compression, oldest first.
    """

    def __init__(self, policy: KVPolicy, timeline: Timeline, facts: Facts, shares: Shares) -> None:
        self.policy, self.timeline, self.facts, self.shares = policy, timeline, facts, shares
        self.clear()

    def clear(self) -> None:
        """Forgets everything."""
        self.store = TokenStore(self.policy.storage)
        self.columns = self.steps = self.new = 0
        self.scaling = 1.0
        self.queries: Tensor | None = None
        self.query_index: Tensor | None = None
        self.rows: list[Row] = []

    @property
    def slots(self) -> int:
        """How many keys per head attention sees, holes included."""
        return sum(block.slots for block in self.store.blocks.values())

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds [batch, heads, new, head_dim]; gives all keys and values that attention sees."""
        self.new = keys.shape[2]
        self.store.append(keys, values, self.columns, self.policy.scorer.accumulates)
        self.columns += self.new
        return self.store.read()

    def mask(self, true_mask: Tensor | None, query: Tensor) -> Tensor | None:
        """The mask for this layer's slots, from the mask over all columns ever seen.

        Args:
            true_mask: [batch or 1, 1, new, columns], bool or additive; None for a plain causal one.
            query: [batch, query heads, new, head_dim].
        """
        if self.store.complete(self.columns):
            return true_mask
        index, weight = self.store.plane("index"), self.store.plane("weight")
        assert index is not None
        return layer_mask(true_mask, index, weight, self.columns, query, self.store.holes)

    @torch.no_grad()
    def attended(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        """After attention: learns from the queries, and compresses if that is due.

        Args:
            query: [batch, query heads, new, head_dim], rotated.
            keys, values: [batch, heads, slots, head_dim] as attention saw them.
        """
        self.steps += 1
        self.scaling = scaling
        self._remember(query)
        if self.policy.scorer.accumulates:
            now = self._view(query, self._index(query.shape[2]), keys, values, scaling)
            self.store.receive(now.by_stored_head(attention.received(now)))
        trigger = self.policy.trigger
        if self.new > 1 or trigger.decodes:
            self._compress_if_due(query, keys, values, scaling)
        if self.timeline.padded and self.store.moves:
            view = self._view(query, self._index(self.new), keys, values, scaling)
            if keys.shape[2] == self.slots:  # nothing was picked: padding is still there
                self.store.execute(Plan(keep=view.live.expand(-1, view.stored_heads, -1)))
        self.store.settle()

    def shrink(self, priority: Tensor, counts: Tensor) -> None:
        """Keeps the best `counts` [batch, 1 or heads] by a table [batch, heads, columns]."""
        keys, values = self.store.read()
        none = keys.new_zeros(keys.shape[0], keys.shape[1], 0, keys.shape[3])
        view = self._view(none, self._index(0), keys, values, self.scaling)
        places = view.index.clamp(min=0).expand(-1, view.stored_heads, -1)
        scores = priority.gather(2, places).masked_fill(~view.live, float("-inf"))
        least = (scores == float("inf")).sum(-1)
        self.compress(scores, torch.maximum(counts.expand_as(least), least), view)

    def compress(self, scores: Tensor, counts: Tensor, view: LayerView) -> None:
        """Keeps the best `counts` [batch, heads] by `scores` [batch, heads, slots] of each head."""
        live = view.live.expand_as(scores)
        within = live.sum(-1) <= counts + self.policy.compressor.extra
        if bool(within.all()):
            return
        counts = torch.where(within, live.sum(-1), counts)
        rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        keep = (rank < counts[..., None]) & live
        self._execute(self.policy.compressor.plan(view, keep), view)
        index = self.store.plane("index")
        assert index is not None
        after = int((index >= 0).expand(-1, view.stored_heads, -1).sum())
        self.rows[-1] |= {"after": after, "bytes": self.store.promised()}

    def nbytes_promised(self) -> int:
        """Bytes of tokens and of remembered queries, counted from sizes alone."""
        extra = 0 if self.queries is None else self.queries.numel() * self.queries.itemsize
        extra += 0 if self.query_index is None else 8 * self.query_index.numel()
        return self.store.promised() + extra

    def nbytes_full(self) -> int:
        """Bytes of the keys and values of every real token ever seen, had none been evicted."""
        tail = self.store.blocks["tail"].planes
        each = sum(tail[name].shape[-1] * tail[name].itemsize for name in ("k0", "v0"))
        return int(self.timeline.seen().sum()) * self.store.heads * each

    def tensors(self) -> dict[str, Tensor]:
        found = dict(self.store.tensors())
        if self.queries is not None and self.query_index is not None:
            found |= {"queries": self.queries, "query_index": self.query_index}
        return found

    def crop(self, columns: int) -> None:
        """Forgets every column from `columns` on; what was evicted before them stays evicted.

        Attention that kept tokens received from forgotten ones stays counted.
        """
        self.store.crop(columns)
        self.columns = columns
        if self.query_index is not None and self.queries is not None:
            kept = (self.query_index < columns).all(0)
            self.queries, self.query_index = self.queries[:, :, kept], self.query_index[:, kept]

    def select(self, rows: Tensor) -> None:
        """These rows of the batch, in this order."""
        self.store.select(rows)
        if self.queries is not None and self.query_index is not None:
            rows = rows.to(self.queries.device)
            self.queries = self.queries.index_select(0, rows)
            self.query_index = self.query_index.index_select(0, rows)

    def force(self) -> None:
        """Compresses now, whatever the trigger says. Scorers see the queries remembered.

        Raises:
            DiffcacheError: the scorer looks at queries that were not remembered.
        """
        scorer = self.policy.scorer
        if scorer.prompt_queries or (scorer.queries and self.queries is None):
            raise DiffcacheError(
                f"{scorer.kind} looks at queries of the pass at hand: compress by a trigger, "
                "or with trigger='manual' if it looks at the last ones"
            )
        keys, values = self.store.read()
        none = keys.new_zeros(keys.shape[0], keys.shape[1], 0, keys.shape[3])
        query = none if self.queries is None else self.queries
        index = self._index(0) if self.query_index is None else self.query_index
        self._compress(self._view(query, index, keys, values, self.scaling), "manual")

    def _compress_if_due(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        view = self._view(query, self._index(query.shape[2]), keys, values, scaling)
        over = self.shares.over(self, view, self._target(view))
        if self.policy.trigger.due(Event(new=self.new, steps=self.steps, over=over)):
            wanted = max(self.policy.scorer.queries, self.policy.budget.queries)
            if not self.policy.scorer.prompt_queries and wanted:
                view = self._last_queries(view, wanted)
            self._compress(view, self.policy.trigger.kind)

    def _compress(self, view: LayerView, reason: str) -> None:
        self.steps = 0
        before = int(view.live.expand(-1, view.stored_heads, -1).sum())
        row = {"layer": self.facts.layer, "columns": self.columns, "reason": reason}
        row |= {"before": before, "after": before, "bytes": self.store.promised()}
        self.rows.append(row)
        target = self._target(view)
        scores = self.policy.scores(view, target)
        budget = self.policy.budget
        if budget.cascade:
            self.shares.arrive(self, view, scores, target)
        else:
            counts = self.policy.counts(target, scores, view)
            self.compress(scores, counts, view)

    def _execute(self, plan: Plan, view: LayerView) -> None:
        gone = view.live.expand_as(plan.keep) & ~plan.stays
        block = None
        if plan.into is not None or plan.summary:
            keys, values = self.store.read()
            if plan.summary and bool(gone.any()):
                weight = self.store.plane("weight")
                block = summary(gone, view.index, keys, values, weight)
            self.store.execute(plan, edits(plan, keys, values))
        else:
            self.store.execute(plan)
        if block is not None:
            self.store.add(block)
            self.store.settle(force=True)

    def _target(self, view: LayerView) -> Tensor:
        return self.policy.budget.target(view.seen, self.shares.affordable(self))

    def _view(
        self, query: Tensor, query_index: Tensor, keys: Tensor, values: Tensor, scaling: float
    ) -> LayerView:
        index = self.store.plane("index")
        real = self.timeline.real
        assert index is not None and real is not None
        shown = real[:, None].expand(-1, index.shape[1], -1).gather(-1, index.clamp(min=0))
        return LayerView(
            keys=keys,
            values=values,
            index=index.where(shown, -1),
            stored_heads=self.store.heads,
            queries=query,
            query_index=query_index,
            received=self.store.plane("received"),
            scaling=scaling,
            timeline=self.timeline,
            facts=self.facts,
        )

    def _index(self, new: int) -> Tensor:
        """int64 [batch, new]: columns of the newest tokens, -1 for padding."""
        real = self.timeline.real
        assert real is not None
        columns = torch.arange(self.columns - new, self.columns, device=real.device)
        return columns.expand(real.shape[0], new).where(real[:, self.columns - new :][:, :new], -1)

    def _remember(self, query: Tensor) -> None:
        """Keeps the last queries from pass to pass, where passes of one token are scored, too."""
        wanted = max(self.policy.scorer.queries, self.policy.budget.queries)
        if not wanted or not self.policy.trigger.remembers:
            return
        index = self._index(query.shape[2])
        if self.queries is not None and self.query_index is not None:
            query = torch.cat([self.queries, query], 2)
            index = torch.cat([self.query_index, index], 1)
        self.queries = query[:, :, -wanted:].clone()
        self.query_index = index[:, -wanted:].clone()

    def _last_queries(self, view: LayerView, wanted: int) -> LayerView:
        queries, index = view.queries, view.query_index
        if self.queries is not None and self.query_index is not None:
            queries, index = self.queries, self.query_index
        return view.with_queries(queries[:, :, -wanted:], index[:, -wanted:])

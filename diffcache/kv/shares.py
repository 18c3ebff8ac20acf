"""What layers of one cache share out among themselves: bytes, and the cascade of preferences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .apportion import apportion
from .layer_view import LayerView

if TYPE_CHECKING:
    from .layer import CompressedLayer


class Shares:
    """Knows all compressed layers of a cache, in order."""

    def __init__(self) -> None:
        self.layers: list[CompressedLayer] = []
        self._arrived: list[Arrival] = []
        self._over = 0

    def affordable(self, layer: CompressedLayer) -> int | None:
        """Tokens per head that the budget's bytes pay for; None where it counts no bytes."""
        budget, storage = layer.policy.budget, layer.policy.storage
        if budget.bytes is None:
            return None
        tail = layer.store.blocks["tail"].planes
        batch, heads = tail["k0"].shape[:2]
        sizes, dtype = (tail["k0"].shape[-1], tail["v0"].shape[-1]), layer.store.dtype
        full = sum(size * dtype.itemsize for size in sizes)
        coded = sum(storage.codec(dtype).nbytes(size, dtype) for size in sizes)
        rest = 4 + 4 * layer.policy.scorer.accumulates
        tables = sum(t.numel() * t.element_size() for t in layer.timeline.tensors().values())
        room = (budget.bytes - tables) / (batch * heads * layer.facts.num_layers)
        room -= 4 if storage.flat() else 0
        newest = min(storage.newest, int(room // (full + rest))) if coded != full else 0
        older = int((room - newest * (full + rest)) // (coded + rest))
        # A head with less than a tail holds holes in it, so no tail is counted on.
        return max(0, older if budget.per_head else newest + older)

    def over(self, layer: CompressedLayer, view: LayerView, target: Tensor) -> int:
        """By how many tokens a head exceeds the budget's mean, on average over its layer's heads.

        Of a cascade the mean is over all layers, so that they are compressed in the same passes.
        """
        held = view.live.sum(-1).float().mean(1)
        if layer.policy.budget.cascade:
            if layer is not self.layers[0]:
                return self._over
            others = [
                other.store.counts().float().mean(1) for other in self.layers[1:] if other.columns
            ]
            held = torch.stack([held, *(other + layer.new for other in others)]).mean(0)
        self._over = int((held - target).ceil().amax())
        return self._over

    def arrive(
        self, layer: CompressedLayer, view: LayerView, scores: Tensor, target: Tensor
    ) -> None:
        """A layer joins the cascade: it and all before it shrink to their share of the total.

        Shares only fall as layers arrive, so a layer shrinks by picks of picks; what they share
        is `target` times the number of all layers. Source: CAKE, arXiv 2503.12491.

        Args:
            scores: fp32 [batch, stored heads, slots]; target: int64 [batch].
        """
        if self._arrived and self._arrived[-1].layer.facts.layer >= layer.facts.layer:
            self._arrived = []  # the next pass
        preference = layer.policy.budget.preference(view)
        priority = by_column(scores, view.index, layer.columns)
        most = view.live.sum(-1).amax(1)
        self._arrived.append(Arrival(layer, priority, preference, most))
        wanted = torch.stack([arrival.preference for arrival in self._arrived], 1)
        limit = torch.stack([arrival.most for arrival in self._arrived], 1)
        counts = apportion(target * layer.facts.num_layers, wanted, limit)
        for number, arrival in enumerate(self._arrived):
            arrival.layer.shrink(arrival.priority, counts[:, number, None])
        if layer is self.layers[-1]:
            self._arrived = []


@dataclass(frozen=True)
class Arrival:
    """A layer of the pass at hand: worth of its tokens by column, its preference, its tokens."""

    layer: CompressedLayer
    priority: Tensor
    preference: Tensor
    most: Tensor


def by_column(scores: Tensor, index: Tensor, columns: int) -> Tensor:
    """Scores [batch, heads, slots] as [batch, heads, columns], -inf where no slot is."""
    table = torch.full((*scores.shape[:2], columns + 1), float("-inf"), device=scores.device)
    places = index.where(index >= 0, columns).expand_as(scores)
    return table.scatter(2, places, scores)[..., :columns]

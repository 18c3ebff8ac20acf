"""Compressed layers without a model: random tokens, plain attention, a plain rotary embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diffcache.kv import KVPolicy
from diffcache.kv.budgets import Uniform
from diffcache.kv.layer import CompressedLayer
from diffcache.kv.layer_view import Facts, LayerView
from diffcache.kv.scorers.position import Position
from diffcache.kv.shares import Shares
from diffcache.kv.timeline import Timeline

HEADS, GROUP, DIM, HIDDEN = 2, 2, 16, 12
SCALING = DIM**-0.5


def rotate(x: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
    """[batch, heads, n, DIM] by positions [1, batch, n], in halves."""
    frequencies = 100.0 ** (-torch.arange(0, DIM, 2) / DIM)
    angle = positions[0, :, None, :, None].float() * frequencies * (-1 if inverse else 1)
    first, second = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def output_weight() -> Tensor:
    return torch.randn(HEADS * GROUP, DIM, HIDDEN, generator=torch.Generator().manual_seed(9))


def policy(**parts: Any) -> KVPolicy:
    """A policy of the given parts, positions and half of the tokens where nothing is given."""
    return KVPolicy(**{"scorer": Position(), "budget": Uniform(keep=0.5), **parts})


class Stack:
    """Layers that see the same random tokens; layer n's keys differ from layer m's."""

    def __init__(self, policy: KVPolicy, layers: int = 1, seed: int = 0) -> None:
        self.timeline, shares = Timeline(), Shares()
        facts = [
            Facts(layer=n, num_layers=layers, rotate=rotate, output_weight=output_weight)
            for n in range(layers)
        ]
        self.layers = [CompressedLayer(policy, self.timeline, fact, shares) for fact in facts]
        shares.layers.extend(self.layers)
        self.generator = torch.Generator().manual_seed(seed)

    def tokens(self, batch: int, new: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values [batch, heads, new, DIM]."""
        sizes = (HEADS * GROUP, HEADS, HEADS)
        return tuple(torch.randn(batch, h, new, DIM, generator=self.generator) for h in sizes)

    def run(
        self, *tokens: Tensor, real: Tensor | None = None, roles: Tensor | None = None
    ) -> list[Tensor]:
        """One pass; what attention gives in each layer [batch, query heads, new, DIM]."""
        batch, new = tokens[0].shape[0], tokens[0].shape[2]
        real = torch.ones(batch, new, dtype=torch.bool) if real is None else real
        self.timeline.extend(real, None, roles)
        return [self._layer(layer, n, *tokens) for n, layer in enumerate(self.layers)]

    def _layer(self, layer: CompressedLayer, n: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.roll(n, -1), v.roll(n, -1)
        keys, values = layer.append(k, v)
        mask = layer.mask(self.true_mask(q.shape[2]), q)
        result = attention(q, keys, values, mask)
        layer.attended(q, keys, values, SCALING)
        return result

    def true_mask(self, new: int) -> Tensor | None:
        """[batch, 1, new, columns] as a host makes it."""
        real, columns = self.timeline.real, self.timeline.columns
        if bool(real.all()) and new in (1, columns):
            return None if new == 1 else torch.ones(new, new, dtype=torch.bool).tril()[None, None]
        newest = torch.arange(columns - new, columns)
        causal = torch.arange(columns) <= newest[:, None]
        return causal[None, None] & real[:, None, None]

    def kept(self, layer: int = 0) -> Tensor:
        """bool [batch, HEADS, columns]."""
        made = self.layers[layer]
        index = made.store.plane("index").expand(-1, HEADS, -1)
        table = torch.zeros(*index.shape[:2], made.columns + 1, dtype=torch.bool)
        return table.scatter(2, index.where(index >= 0, made.columns), True)[..., : made.columns]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    k, v = k.repeat_interleave(GROUP, 1), v.repeat_interleave(GROUP, 1)
    if k.shape[1] != q.shape[1]:  # one stored head for all
        k, v = (x.expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALING)


def view(stack: Stack, *tokens: Tensor, layer: int = 0, real: Tensor | None = None) -> LayerView:
    """What a scorer sees of a layer after a pass of these tokens, with all of its queries."""
    stack.run(*tokens, real=real)
    made = stack.layers[layer]
    keys, values = made.store.read()
    return made._view(tokens[0], made._index(tokens[0].shape[2]), keys, values, SCALING)

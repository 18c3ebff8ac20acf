"""Attention weights for scorers: a few queries at a time, never all of them at once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .layer_view import LayerView

ROWS = 64  # queries whose weights exist at the same time


def weights(view: LayerView, queries: Tensor, query_index: Tensor) -> Tensor:
    """The true weights of some queries over the view's slots, in fp32.

    Args:
        queries: [batch, query heads, n, head_dim], rotated.
        query_index: int64 [batch, n], their columns; rows of padding (-1) come out as zeros.

    Returns:
        [batch, heads, group, n, slots]: group is the query heads of one key head.
    """
    heads = view.keys.shape[1]
    batch, _, n, size = queries.shape
    grouped = queries.float().reshape(batch, heads, -1, n, size)
    logits = grouped @ view.keys.float()[:, :, None].transpose(-1, -2) * view.scaling
    # [batch, heads or 1, n, slots]
    visible = view.live[:, :, None] & (view.index[:, :, None] <= query_index[:, None, :, None])
    logits = logits.masked_fill(~visible[:, :, None], float("-inf"))
    shares: Tensor = logits.softmax(-1).nan_to_num(nan=0.0)
    return shares


def blocks(view: LayerView) -> Iterator[Tensor]:
    """`weights` of all the view's queries, ROWS at a time."""
    for start in range(0, view.queries.shape[2], ROWS):
        rows = slice(start, start + ROWS)
        yield weights(view, view.queries[:, :, rows], view.query_index[:, rows])


def received(view: LayerView) -> Tensor:
    """fp32 [batch, heads, slots]: what each slot received from all the view's queries.

    Summed over the queries, averaged over the query heads of a key head.
    """
    heads, slots = view.keys.shape[1], view.keys.shape[2]
    total = torch.zeros(view.keys.shape[0], heads, slots, device=view.keys.device)
    for block in blocks(view):
        total += block.sum(3).mean(2)
    return total

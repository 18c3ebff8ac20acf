"""What a plan's merges and summaries make of keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

from .bits import Codec
from .block import Block
from .plan import Plan

Edits = tuple[Tensor, Tensor, Tensor]


def edits(plan: Plan, keys: Tensor, values: Tensor) -> Edits | None:
    """Each kept slot that takes others up becomes the mean of itself and them.

    Args:
        keys, values: [batch, heads, slots, head_dim], as stored.

    Returns:
        bool [batch, heads, slots] of slots that change, and all keys and values; None if none.
    """
    if plan.into is None:
        return None
    moved = plan.into >= 0
    places = plan.into.clamp(min=0)
    count = torch.ones(moved.shape, device=keys.device)
    count.scatter_add_(2, places, moved.float())
    merged = []
    for x in (keys, values):
        total = x.float()
        given = total * moved[..., None]
        total = total.scatter_add(2, places[..., None].expand_as(x), given)
        merged.append((total / count[..., None]).to(x.dtype))
    if not plan.merge_keys:
        merged[0] = keys
    return (count > 1) & plan.keep, merged[0], merged[1]


def summary(
    gone: Tensor, index: Tensor, keys: Tensor, values: Tensor, weight: Tensor | None
) -> Block:
    """One slot per head that stands for the slots that go: bool [batch, heads, slots] `gone`.

    A slot that stood for others before counts as often as it stood for. Heads of which nothing
    goes get a slot without a token. The slot's column is the newest of those that went.
    """
    times = torch.ones(gone.shape, device=keys.device) if weight is None else weight.exp()
    times = times * gone
    total = times.sum(-1, keepdim=True)  # [batch, heads, 1]
    share = (times / total.clamp(min=1))[..., None]
    mean_key = (keys.float() * share).sum(2, keepdim=True).to(keys.dtype)
    mean_value = (values.float() * share).sum(2, keepdim=True).to(values.dtype)
    column = index.expand_as(gone).masked_fill(~gone, -1).amax(-1, keepdim=True)
    made = Block.of(
        Codec(),
        mean_key,
        mean_value,
        index=column.to(torch.int32),
        weight=total.clamp(min=1).log(),
    )
    return Block(codec=made.codec, planes=made.planes, holes=bool((column < 0).any()))

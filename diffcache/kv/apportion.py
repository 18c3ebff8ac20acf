"""Sharing a whole number out exactly."""

from __future__ import annotations

import torch
from torch import Tensor


def apportion(total: Tensor, shares: Tensor, limit: Tensor) -> Tensor:
    """Whole numbers that sum to the total, in proportion to the shares, none above its limit.

    Args:
        total: int64 [batch].
        shares: [batch, n], not negative; all zero counts as equal.
        limit: int64 [batch, n]. What one cannot take goes to the others.

    Returns:
        int64 [batch, n], summing to the total, or to all limits where those are less.
    """
    shares = shares.double().clamp(min=0).nan_to_num(nan=0.0)
    shares = shares.where(shares.sum(-1, keepdim=True) > 0, 1.0)
    given = torch.zeros_like(limit)
    for _ in range(shares.shape[-1]):
        rest = (total - given.sum(-1)).clamp(min=0)
        open_ = (given < limit) & (rest > 0)[:, None]
        if not bool(open_.any()):
            break
        weight = shares * open_
        weight = weight.where(weight.sum(-1, keepdim=True) > 0, open_.double())
        exact = weight / weight.sum(-1, keepdim=True).clamp(min=1e-300) * rest[:, None]
        # Rounded sums of the exact parts differ from them by less than one and end at the total.
        ends = exact.cumsum(-1)
        ends[:, -1] = rest
        ends = (ends + 1e-9).floor().long()
        part = ends.diff(dim=-1, prepend=torch.zeros_like(ends[:, :1]))
        given = torch.minimum(given + part.clamp(min=0), limit)
    return given

"""The mask of one layer's slots, from the mask over all columns that were ever seen."""

from __future__ import annotations

import torch
from torch import Tensor


def layer_mask(
    true_mask: Tensor | None,
    index: Tensor,
    weight: Tensor | None,
    columns: int,
    query: Tensor,
    holes: bool,
) -> Tensor | None:
    """What the newest queries may see of a layer's slots.

    Args:
        true_mask: [batch or 1, 1, new, columns], bool or additive, as the host makes it for a
            cache from which nothing was evicted; None for a plain causal one.
        index: int64 [batch, heads or 1, slots], the column of each slot, -1 for none.
        weight: fp32 [batch, heads, slots], added to the logits; None for none.
        query: [batch, query heads, new, head_dim].
        holes: whether some slots hold no token.

    Returns:
        [batch, query heads or 1, new, slots], or None where every query sees every slot.
    """
    new = query.shape[2]
    if true_mask is None:
        if new == 1 and not holes and weight is None:
            return None
        newest = torch.arange(columns - new, columns, device=index.device)
        mask = index[:, :, None] <= newest[:, None]
    else:
        wide = true_mask.expand(index.shape[0], index.shape[1], -1, -1)
        places = index.clamp(min=0)[:, :, None].expand(-1, -1, new, -1)
        mask = wide.gather(-1, places)
    least = torch.finfo(query.dtype).min
    empty = (index < 0)[:, :, None]
    mask = mask & ~empty if mask.dtype == torch.bool else mask.masked_fill(empty, least)
    if weight is not None:
        bias = weight[:, :, None].to(query.dtype)
        mask = bias.where(mask, least) if mask.dtype == torch.bool else mask + bias
    if mask.shape[1] == 1:
        return mask
    return mask.repeat_interleave(query.shape[1] // mask.shape[1], 1)

"""Pages of keys and what is kept of them: mean, least and greatest key, so that most go unread.

Source: the box bound of Quest, arXiv 2406.10774.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SUMMARIES = ("page_mean", "page_min", "page_max")


@dataclass(frozen=True, kw_only=True)
class PageView:
    """Summaries [items, pages, heads, head_dim] in fp32, pages in the order in which they are read.

    They may be views of the cache, good until the next `append`, and not to be written.

    Attributes:
        frames, positions: for each item and page the frame that it belongs to, and where that is
            rotated; -1 and 0 where an item has fewer pages.
        chunk_positions: for each item the position of the chunk's first frame.
    """

    mean: Tensor
    minimum: Tensor
    maximum: Tensor
    frames: tuple[tuple[int, ...], ...]
    positions: tuple[tuple[int, ...], ...]
    chunk_positions: tuple[int, ...]


def summarise(keys: Tensor, page_tokens: int) -> dict[str, Tensor]:
    """Summaries [..., pages, heads, head_dim] of keys [..., tokens, heads, head_dim] as read."""
    pages = keys.float().reshape(*keys.shape[:-3], -1, page_tokens, *keys.shape[-2:])
    found = pages.mean(dim=-3), pages.amin(dim=-3), pages.amax(dim=-3)
    return dict(zip(SUMMARIES, found, strict=True))


def page_bound(query: Tensor, minimum: Tensor, maximum: Tensor) -> Tensor:
    """A number that no logit query . key of the page exceeds: [items, queries, pages, heads].

    Keys lie unrotated, so a query must be turned into their frame: rotated by its own position
    less that of the page. All tokens of a page share one temporal position, so this is exact. It
    is inf where a key or the query is not finite, or too large to tell: such a page is read.

    Args:
        query: [items, queries, pages or 1, query heads, head_dim]; where there are more query
            heads than key heads, groups of them share a key head.
        minimum, maximum: [items, pages, heads, head_dim], as in `PageView`.

    Raises:
        ValueError: query heads that are no multiple of the key heads.
    """
    if query.shape[-2] % minimum.shape[-2]:
        found = f"{query.shape[-2]} of the query, {minimum.shape[-2]} of the keys"
        raise ValueError(f"query heads must be a multiple of key heads, got {found}")
    group = query.shape[-2] // minimum.shape[-2]
    low, high = (x.repeat_interleave(group, dim=-2)[:, None] for x in (minimum, maximum))
    query = query.float()
    low, high = query * low, query * high
    # The sum of a logit may round up where this one rounds down: twice head_dim roundings apart.
    largest = torch.maximum(low.abs(), high.abs()).sum(-1)
    number = torch.finfo(torch.float32)
    slack = 2 * query.shape[-1] * (number.eps * largest + number.tiny)
    bound = torch.maximum(low, high).sum(-1) + slack
    return bound.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf)

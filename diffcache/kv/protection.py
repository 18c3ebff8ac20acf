"""Which tokens stay whatever their score."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..parts import check_count, check_range
from .base import Protection, part
from .layer_view import LayerView


@part("protection")
@dataclass(frozen=True, kw_only=True)
class Boundaries(Protection):
    """The first and the last real tokens, and tokens of given roles; padding counts for nothing.

    Attributes:
        sinks: how many of the first tokens.
        recent: how many of the last ones.
        roles: numbers of the roles whose tokens all stay: all text, the current image, pinned
            spans, or whatever the caller says of tokens (`diffcache.kv_roles`).
    """

    sinks: int = 4
    recent: int = 8
    roles: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_count("sinks", self.sinks, 0)
        check_count("recent", self.recent, 0)
        for role in self.roles:
            check_count("each of roles", role, 1, 127)

    def mask(self, view: LayerView, target: Tensor) -> Tensor:
        last = torch.full_like(view.seen, self.recent)
        return protected(view, self.sinks, last, self.roles)

    def least(self) -> int:
        return self.sinks + self.recent


@part("protection")
@dataclass(frozen=True, kw_only=True)
class RecentShare(Protection):
    """The first real tokens, and the last ones as a share of the budget.

    Source: H2O, arXiv 2306.14048, gives half of it to the last tokens.
    """

    sinks: int = 0
    share: float = 0.5

    def __post_init__(self) -> None:
        check_count("sinks", self.sinks, 0)
        check_range("share", self.share, 0, 1)

    def mask(self, view: LayerView, target: Tensor) -> Tensor:
        last = torch.floor(target.double() * self.share).long()
        return protected(view, self.sinks, last, ())

    def least(self) -> int:
        return self.sinks


def protected(view: LayerView, sinks: int, recent: Tensor, roles: tuple[int, ...]) -> Tensor:
    """bool [batch, heads or 1, slots]; recent: int64 [batch]."""
    order = view.order
    safe = (order < sinks) | (order >= (view.seen - recent)[:, None, None])
    if roles and view.timeline.roles is not None:
        role = view.per_token(view.timeline.roles)
        safe = safe | torch.stack([role == number for number in roles]).any(0)
    return safe & view.live

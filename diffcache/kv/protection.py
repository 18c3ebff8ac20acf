"""Which tokens stay whatever their score."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..parts import check_count
from .base import Protection, part
from .layer_view import LayerView

TEXT_ROLES = (1, 2, 3)  # system, user, text


@part("protection")
@dataclass(frozen=True, kw_only=True)
class Boundaries(Protection):
    """The first and the last real tokens, and tokens of given roles; padding counts for nothing.

    Attributes:
        sinks: how many of the first tokens.
        recent: how many of the last ones.
        roles: numbers of the roles whose tokens all stay (see `Timeline.roles`).
    """

    sinks: int = 4
    recent: int = 8
    roles: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_count("sinks", self.sinks, 0)
        check_count("recent", self.recent, 0)
        for role in self.roles:
            check_count("each of roles", role, 1, 127)

    def mask(self, view: LayerView) -> Tensor:
        order = view.order
        safe = (order < self.sinks) | (order >= view.seen[:, None, None] - self.recent)
        if self.roles and view.timeline.roles is not None:
            role = view.per_token(view.timeline.roles)
            for number in self.roles:
                safe = safe | (role == number)
        return safe & view.live

    def least(self) -> int:
        return self.sinks + self.recent

"""When a layer is compressed. A layer within its budget is left alone at any rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..parts import check_count
from .base import Event, Trigger, part


@part("trigger")
@dataclass(frozen=True, kw_only=True)
class AfterPrefill(Trigger):
    """After every pass of several tokens: a prompt, a chunk of one, another turn.

    Attributes:
        slack: tokens beyond the budget that are let be; short questions pass untouched.
    """

    slack: int = 0

    def __post_init__(self) -> None:
        check_count("slack", self.slack, 0)

    def due(self, event: Event) -> bool:
        return event.new > 1 and event.over > self.slack


@part("trigger")
@dataclass(frozen=True, kw_only=True)
class Manual(Trigger):
    """Never by itself: when the cache's `compress` is called."""

    remembers: ClassVar[bool] = True

    def due(self, event: Event) -> bool:
        return False

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
class EverySteps(Trigger):
    """After every pass of several tokens, and then every `steps` passes.

    Between, a cache is never above its budget by more than `steps` tokens.
    """

    decodes: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    steps: int = 1

    def __post_init__(self) -> None:
        check_count("steps", self.steps, 1)

    def due(self, event: Event) -> bool:
        return event.over > 0 and (event.new > 1 or event.steps >= self.steps)


@part("trigger")
@dataclass(frozen=True, kw_only=True)
class Overflow(Trigger):
    """As soon as heads exceed the budget by more than `slack` tokens."""

    decodes: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    slack: int = 32

    def __post_init__(self) -> None:
        check_count("slack", self.slack, 0)

    def due(self, event: Event) -> bool:
        return event.over > self.slack


@part("trigger")
@dataclass(frozen=True, kw_only=True)
class Manual(Trigger):
    """Never by itself: when the cache's `compress` is called."""

    remembers: ClassVar[bool] = True

    def due(self, event: Event) -> bool:
        return False

"""Snapshots: what was overwritten since, so that it can be put back to the bit.

A snapshot costs nothing when it is taken. While somebody holds it, the first write to a slot that
was in use then saves that slot's content, once for all snapshots that want it; dropping the last
reference ends that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .store import Raw

Where = tuple[int, int, int]  # layer, batch item, slot


@dataclass(eq=False)
class Saved:
    """What lay in one slot, one copy for all snapshots that want it, and its bytes."""

    raw: Raw
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = sum(part.nbytes for part in self.raw.values())


@dataclass(eq=False)
class Snapshot:
    """One moment of one cache.

    Attributes:
        numbers: for each layer and item what lay where.
        saved: what was overwritten since.
    """

    numbers: list[list[dict[str, Any]]]
    saved: dict[Where, Saved] = field(default_factory=dict)

    def wants(self, where: Where) -> bool:
        """Whether the slot held a frame then and was not saved yet."""
        layer, item, slot = where
        return where not in self.saved and self.numbers[layer][item]["frames"][slot] >= 0

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps; other snapshots may keep the same ones."""
        return sum(saved.nbytes for saved in self.saved.values())

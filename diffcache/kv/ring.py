"""Which frame lies in which slot of a layer; numbers only, so nothing ever waits for a device."""

from __future__ import annotations

from dataclasses import dataclass, field

from .scopes import Scope

EMPTY = -1


@dataclass
class Ring:
    """One batch item of one layer.

    A frame stays in its slot until it leaves the scope; a new one takes the slot of one that left.

    Attributes:
        frames: the true frame number in each slot, or EMPTY.
        end: the true number of the next frame.
        stale: frames whose keys and values still carry context that was evicted (RECOMPUTE).
    """

    scope: Scope
    frames: list[int]
    end: int = 0
    stale: set[int] = field(default_factory=set)

    def plan(self, count: int) -> list[tuple[int, int]]:
        """(frame, slot) of those of the next `count` frames that will be kept, changing nothing."""
        end = self.end + count
        kept = [frame for frame in range(self.end, end) if self.scope.keeps(frame, end)]
        free = [s for s, frame in enumerate(self.frames) if not self.scope.keeps(frame, end)]
        return list(zip(kept, free, strict=False))

    def advance(self, count: int, plan: list[tuple[int, int]], recompute: bool) -> None:
        """Takes the next `count` frames in, of which `plan` said where they lie."""
        self.end += count
        left = [frame for frame in self.held() if not self.scope.keeps(frame, self.end)]
        self.frames = [f if self.scope.keeps(f, self.end) else EMPTY for f in self.frames]
        for frame, slot in plan:
            self.frames[slot] = frame
        held = set(self.held())
        self.stale = held if recompute and (left or len(plan) < count) else self.stale & held

    def held(self) -> list[int]:
        """The frames kept, in the order of their slots."""
        return [frame for frame in self.frames if frame != EMPTY]

    def slots(self) -> list[int]:
        """The slots in use, in order."""
        return [slot for slot, frame in enumerate(self.frames) if frame != EMPTY]

    def clear(self) -> None:
        self.frames, self.end, self.stale = [EMPTY] * len(self.frames), 0, set()

    def numbers(self) -> dict[str, object]:
        """What `restore` takes: the state as plain numbers."""
        return {"frames": list(self.frames), "end": self.end, "stale": sorted(self.stale)}

    def restore(self, frames: list[int], end: int, stale: list[int]) -> None:
        self.frames, self.end, self.stale = list(frames), end, set(stale)

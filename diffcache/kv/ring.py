"""Which frame lies in which slot of a layer; numbers only, so nothing ever waits for a device."""

from __future__ import annotations

from dataclasses import dataclass, field

from .scopes import Scope

EMPTY = -1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Frames to move from slot to slot (device to host), then frames to write into slots."""

    moves: list[tuple[int, int, int]]
    writes: list[tuple[int, int]]

    def placed(self) -> list[tuple[int, int]]:
        """(frame, slot) of all that moved or came."""
        return [*((frame, target) for frame, _, target in self.moves), *self.writes]


@dataclass
class Ring:
    """One batch item of one layer.

    A frame stays in its slot until it leaves the scope; a new one takes the slot of one that left.

    Attributes:
        frames: the true frame number in each slot, or EMPTY.
        end: the true number of the next frame.
        device_slots: how many of the slots, the first ones, lie on the device.
        stale: frames whose keys and values still carry context that was evicted (RECOMPUTE).
    """

    scope: Scope
    frames: list[int]
    device_slots: int
    end: int = 0
    stale: set[int] = field(default_factory=set)

    def plan(self, count: int) -> Plan:
        """What taking in the next `count` frames will do, changing nothing."""
        end = self.end + count
        stay = {f: s for s, f in enumerate(self.frames) if self.scope.keeps(f, end)}
        new = [frame for frame in range(self.end, end) if self.scope.keeps(frame, end)]
        near = self.near([*stay, *new])
        leave = [f for f, slot in stay.items() if slot < self.device_slots and f not in near]
        taken = {slot for frame, slot in stay.items() if frame not in leave}
        free = [slot for slot in range(len(self.frames)) if slot not in taken]
        device = iter([slot for slot in free if slot < self.device_slots])
        host = iter([slot for slot in free if slot >= self.device_slots])
        moves = [(frame, stay[frame], next(host)) for frame in sorted(leave)]
        writes = [(frame, next(device if frame in near else host)) for frame in new]
        return Plan(moves=moves, writes=writes)

    def near(self, frames: list[int]) -> set[int]:
        """Those of `frames` that belong on the device: sinks and the newest.

        A frame only ever grows older among those kept, so none comes back from the host.
        """
        order = sorted(frames, key=lambda frame: (frame >= self.scope.sinks, -frame))
        return set(order[: self.device_slots])

    def advance(self, count: int, plan: Plan, recompute: bool) -> None:
        """Takes the next `count` frames in, of which `plan` said where they lie."""
        self.end += count
        left = [frame for frame in self.held() if not self.scope.keeps(frame, self.end)]
        self.frames = [f if self.scope.keeps(f, self.end) else EMPTY for f in self.frames]
        for _, source, _ in plan.moves:
            self.frames[source] = EMPTY
        for frame, slot in plan.placed():
            self.frames[slot] = frame
        held = set(self.held())
        self.stale = held if recompute and (left or len(plan.writes) < count) else self.stale & held

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

"""Which frames a layer keeps, by name: the scopes of ReCaVSR, arXiv 2609.37831, and sinks.

A scope is "none" or parts joined by "+": "sink" (the first `sink_size` frames), "window" (the last
`window_size`), "recent_n" (the last n) and "anchor" (the last two frames i with (i - 5) mod 6 = 0).
The paper's seven: none, recent_1, recent_2, recent_4, anchor, recent_2+anchor, recent_4+anchor.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ANCHOR_PERIOD = 6
ANCHOR_FIRST = 5
ANCHORS = 2


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Frames below `sinks`, the last `recent` ones, and the last `anchors` anchors."""

    sinks: int = 0
    recent: int = 0
    anchors: int = 0

    @property
    def slots(self) -> int:
        """The most frames that are ever kept at once."""
        return self.sinks + self.recent + self.anchors

    @property
    def reach(self) -> int:
        """How many frames back from the next one the oldest kept frame, sinks aside, may lie."""
        return max(self.recent, self.anchors * ANCHOR_PERIOD)

    def keeps(self, frame: int, end: int) -> bool:
        """Whether `frame` is kept once the frames before `end` were written.

        A frame that is not kept at one `end` is not kept at any later one.
        """
        if not 0 <= frame < end:
            return False
        return frame < self.sinks or frame >= end - self.recent or self._anchor(frame, end)

    def kept(self, end: int) -> list[int]:
        """All frames kept once the frames before `end` were written, in order of time."""
        near = range(max(0, end - self.reach), end)
        return [f for f in sorted({*range(self.sinks), *near}) if self.keeps(f, end)]

    def _anchor(self, frame: int, end: int) -> bool:
        # Later anchors: those in (frame, end).
        later = (end - 1 - frame) // ANCHOR_PERIOD
        return frame % ANCHOR_PERIOD == ANCHOR_FIRST and later < self.anchors


def scope(name: str, sink_size: int, window_size: int) -> Scope:
    """The scope of that name.

    Raises:
        ValueError: a part that is none of those above.
    """
    found = {"sinks": 0, "recent": 0, "anchors": 0}
    for word in [] if name == "none" else name.split("+"):
        recent = re.fullmatch(r"recent_([1-9]\d*)", word)
        if recent or word == "window":
            found["recent"] = max(found["recent"], int(recent[1]) if recent else window_size)
        elif word == "sink":
            found["sinks"] = sink_size
        elif word == "anchor":
            found["anchors"] = ANCHORS
        else:
            raise ValueError(
                "a scope is 'none' or of 'sink', 'window', 'recent_n', 'anchor' joined by '+', "
                f"got {name!r}"
            )
    return Scope(**found)

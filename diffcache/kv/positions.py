"""At which temporal position a kept frame is rotated when it is read.

Keys are stored unrotated, so a mode only names numbers: one for each kept frame and one for the
first frame of the chunk that attends to them (its other frames follow on). Attention sees nothing
but the differences; the size of the numbers matters where the rotary table ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Positions(str, Enum):
    """Where kept frames stand in time for the chunk that reads them.

    KEEP: where they were made. Grows for ever, so the table bounds the length of the video.
        Source: Self-Forcing, arXiv 2506.08009.
    RELATIVE: frames kept count 0, 1, ... in order of time, gaps closed; the chunk follows.
        Source: window-relative rotation as in LongLive, arXiv 2509.22622.
    ANCHOR: sinks stand right before the oldest other frame kept, everything else where it was
        made. Grows as KEEP does. Source: Rolling Forcing, arXiv 2509.25161.
    RENUMBER: where they were made, less a shift common to all but the sinks; it grows by half of
        what the table leaves beside sinks and reach whenever the chunk would pass the table's
        end. Bounded; distances among frames that are not sinks stay true.
        Source: StreamDiffusionV2, arXiv 2511.07399, which starts again at half of its table.
    RECOMPUTE: as RELATIVE, and after an eviction nothing is read until the frames kept were
        written again without what was evicted. Source: Krea Realtime's recomputed context.
    """

    KEEP = "keep"
    RELATIVE = "relative"
    ANCHOR = "anchor"
    RENUMBER = "renumber"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, kw_only=True)
class Span:
    """What the modes need to know beside the frames kept.

    Attributes:
        sink_size: frames below this number are sinks.
        reach: how many frames before the chunk the oldest kept frame that is no sink may lie.
        max_position: length of the rotary table in frames, None for no bound.
    """

    sink_size: int
    reach: int
    max_position: int | None


def place(mode: Positions, held: Sequence[int], start: int, count: int, span: Span) -> list[int]:
    """Positions of the frames `held` (true numbers, any order), then that of frame `start`.

    Args:
        start: the true number of the chunk's first frame; `count` frames belong to the chunk.
    """
    if mode is Positions.KEEP:
        return [*held, start]
    if mode is Positions.ANCHOR:
        return _anchored(held, start, span.sink_size)
    if mode is Positions.RENUMBER:
        moved = shift(start + count, span)
        return [f if f < span.sink_size else f - moved for f in (*held, start)]
    rank = {frame: index for index, frame in enumerate(sorted(held))}
    return [*(rank[frame] for frame in held), len(held)]


def _anchored(held: Sequence[int], start: int, sink_size: int) -> list[int]:
    sinks = sorted(frame for frame in held if frame < sink_size)
    first = min((frame for frame in held if frame >= sink_size), default=start)
    place_of = {frame: first - len(sinks) + index for index, frame in enumerate(sinks)}
    return [*(place_of.get(frame, frame) for frame in held), start]


def stride(span: Span) -> int:
    """By how many frames RENUMBER moves at a time: half of what sinks and reach leave."""
    assert span.max_position is not None
    return (span.max_position - span.sink_size - span.reach) // 2


def shift(end: int, span: Span) -> int:
    """What RENUMBER takes off the true numbers while a chunk ends before frame `end`."""
    assert span.max_position is not None
    beyond = max(0, end - span.max_position)
    return -(-beyond // stride(span)) * stride(span)


def refusal(mode: Positions, held: int, start: int, count: int, span: Span) -> str | None:
    """Why a chunk of `count` frames from `start` on, beside `held` frames, may not be placed.

    KEEP, ANCHOR: its last frame would lie beyond the table. RELATIVE, RECOMPUTE: frames held and
    chunk together outnumber the table. RENUMBER: the chunk is longer than one stride leaves room
    for, which is the same at every chunk and so is said at the first.
    """
    if span.max_position is None:
        return None
    bounded = "positions='relative' or 'renumber'"
    if mode in (Positions.KEEP, Positions.ANCHOR) and start + count > span.max_position:
        return (
            f"frames {start} to {start + count - 1} lie beyond the rotary table of "
            f"{span.max_position} frames: use {bounded}, or a longer table"
        )
    if mode in (Positions.RELATIVE, Positions.RECOMPUTE) and held + count > span.max_position:
        return (
            f"{held} frames kept and {count} of the chunk exceed the rotary table of "
            f"{span.max_position} frames: make the window or the chunk smaller"
        )
    if mode is Positions.RENUMBER:
        room = span.max_position - span.sink_size - span.reach - stride(span)
        if count > room:
            return f"positions='renumber' has room for chunks of {room} frames here, got {count}"
    return None

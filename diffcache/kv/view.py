"""What a layer hands to attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .checks import wholes
from .positions import Positions, Span, place
from .ring import EMPTY, Ring


@dataclass(frozen=True, kw_only=True)
class KVView:
    """The kept frames of one layer, in the order of their slots; numbers are plain tuples.

    Where pages were asked for, "frame" below reads "page": each has the number of its frame.

    Attributes:
        keys, values: [items, frames * frame_tokens, heads, head_dim], keys not rotated. They may
            be views of the cache: not to be written, and good until the next `append`.
        frames: for each item the true number of each frame; -1 where an item has fewer.
        positions: for each item the temporal position at which each frame is rotated.
        chunk_positions: for each item the position of the chunk's first frame; the others follow.
        mask: [items, frames * frame_tokens], True where a token is real; None if all are.
    """

    keys: Tensor
    values: Tensor
    frames: tuple[tuple[int, ...], ...]
    positions: tuple[tuple[int, ...], ...]
    chunk_positions: tuple[int, ...]
    mask: Tensor | None


NOWHERE = (-1, 0)
T = TypeVar("T")


def padded(rows: Sequence[Sequence[T]], fill: T) -> list[list[T]]:
    longest = max(len(row) for row in rows)
    return [[*row, *[fill] * (longest - len(row))] for row in rows]


@dataclass(frozen=True, kw_only=True)
class Entries:
    """What a view lists for each item, padded to equal lengths.

    Attributes:
        places: (slot, page in it), or (-1, 0) for padding; page 0 where whole frames are listed.
        frames, positions, chunk_positions: as in `KVView`.
    """

    places: list[list[tuple[int, int]]]
    frames: list[list[int]]
    positions: list[list[int]]
    chunk_positions: list[int]

    def pages(self, chosen: Sequence[Sequence[int]] | None, each: int) -> Entries:
        """Pages of these frames, `each` per frame; None for all, else one row for each item.

        Raises:
            ValueError: not one row for each item, a page that is not there, one asked for twice.
        """
        counts = [each * sum(frame != EMPTY for frame in row) for row in self.frames]
        rows = [list(range(count)) for count in counts]
        if chosen is not None:
            rows = [wholes("pages", row) for row in chosen]
        if len(rows) != len(counts):
            raise ValueError(f"pages must have a row for each of {len(counts)} items")
        for row, count in zip(rows, counts, strict=True):
            if len(set(row)) < len(row) or not all(0 <= page < count for page in row):
                raise ValueError(f"pages must be different ones of the first {count}, got {row}")
        lines = list(enumerate(rows))
        return Entries(
            places=padded(
                [[(self.places[n][p // each][0], p % each) for p in row] for n, row in lines],
                NOWHERE,
            ),
            frames=padded([[self.frames[n][p // each] for p in row] for n, row in lines], EMPTY),
            positions=padded([[self.positions[n][p // each] for p in row] for n, row in lines], 0),
            chunk_positions=self.chunk_positions,
        )


def entries(rings: Sequence[Ring], count: int, mode: Positions, span: Span) -> Entries:
    """The frames of each ring, for a chunk of `count` frames."""
    placed = [place(mode, ring.held(), ring.end, count, span) for ring in rings]
    return Entries(
        places=padded([[(slot, 0) for slot in ring.slots()] for ring in rings], NOWHERE),
        frames=padded([ring.held() for ring in rings], EMPTY),
        positions=padded([row[:-1] for row in placed], 0),
        chunk_positions=[row[-1] for row in placed],
    )


def real(frames: Sequence[Sequence[int]], tokens: int, like: Tensor) -> Tensor | None:
    """The mask of a view on the device of `like`, None where nothing is padded."""
    if all(frame != EMPTY for row in frames for frame in row):
        return None
    kept = torch.tensor([[f != EMPTY for f in row] for row in frames], device=like.device)
    return kept.repeat_interleave(tokens, dim=1)

"""What a layer hands to attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .positions import Positions, Span, place
from .ring import EMPTY, Ring


@dataclass(frozen=True, kw_only=True)
class KVView:
    """The kept frames of one layer, in the order of their slots; numbers are plain tuples.

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


def padded(rows: Sequence[Sequence[int]], fill: int) -> list[list[int]]:
    longest = max(len(row) for row in rows)
    return [[*row, *[fill] * (longest - len(row))] for row in rows]


def numbers(
    rings: Sequence[Ring], count: int, mode: Positions, span: Span
) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Frames and positions of each ring, padded, and the position of a chunk of `count` frames."""
    placed = [place(mode, ring.held(), ring.end, count, span) for ring in rings]
    frames = padded([ring.held() for ring in rings], EMPTY)
    return frames, padded([row[:-1] for row in placed], 0), [row[-1] for row in placed]


def real(frames: Sequence[Sequence[int]], frame_tokens: int, like: Tensor) -> Tensor | None:
    """The mask of a view on the device of `like`, None where nothing is padded."""
    if all(frame != EMPTY for row in frames for frame in row):
        return None
    kept = torch.tensor([[f != EMPTY for f in row] for row in frames], device=like.device)
    return kept.repeat_interleave(frame_tokens, dim=1)

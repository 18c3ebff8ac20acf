"""Reads that are kept between writes, so that a chunk decodes once and not at every step.

A decoded window takes more than its eight-bit storage saves, so it is kept only as long as a chunk
is made: of many sessions one at a time pays for it. A layer that can pay for ever is better stored
in bfloat16 in the first place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
Key = tuple[object, ...]


class ReadMemo:
    """Keys and values as they were read, by layer and by what was asked for.

    Attributes:
        depth: how many `RollingCache.decoded` blocks are open; nothing is kept outside of them.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._kept: dict[int, dict[Key, Pair]] = {}

    @property
    def nbytes(self) -> int:
        pairs = [pair for layer in self._kept.values() for pair in layer.values()]
        return sum(tensor.nbytes for pair in pairs for tensor in pair)

    def read(self, layer: int, key: Key, load: Callable[[], tuple[Pair, bool]]) -> Pair:
        """What `load` gives, once; it also says whether that is a copy, worth keeping."""
        if not self.depth:
            return load()[0]
        kept = self._kept.setdefault(layer, {})
        if key in kept:
            return kept[key]
        with torch.inference_mode(False):  # what is kept may be read again outside of it
            pair, copied = load()
        if copied:
            kept[key] = pair
        return pair

    def open(self) -> None:
        self.depth += 1

    def close(self) -> None:
        self.depth -= 1
        if not self.depth:
            self._kept.clear()

    def drop(self, layer: int) -> None:
        """Forgets a layer, which is about to be written."""
        self._kept.pop(layer, None)

"""In which form kept tokens lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ..parts import check_choice, check_count
from .base import Storage, part
from .bits import Codec, Integer

BLOCKS = (0, 16, 32, 64, 128, 256)


@part("storage")
@dataclass(frozen=True, kw_only=True)
class Contiguous(Storage):
    """One rectangle per layer, as it comes; heads or rows with fewer tokens have holes."""

    def codec(self, dtype: torch.dtype) -> Codec:
        return Codec()


@part("storage")
@dataclass(frozen=True, kw_only=True)
class Ragged(Storage):
    """Heads one after the other without holes, as soon as they hold different numbers."""

    ragged: ClassVar[bool] = True

    def codec(self, dtype: torch.dtype) -> Codec:
        return Codec()


@part("storage")
@dataclass(frozen=True, kw_only=True)
class Quantised(Storage):
    """Few bits for all but the newest tokens; ragged where heads hold different numbers.

    Attributes:
        bits: 8, 4 or 2 for each number.
        block: size of the Hadamard blocks that spread outliers before coding, 0 for none.
        tail: how many of the newest tokens stay in full precision. Up to 16 more wait there, so
            that tokens are coded in handfuls.
    """

    ragged: ClassVar[bool] = True

    bits: int = 4
    block: int = 64
    tail: int = 32

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, (8, 4, 2))
        check_choice("block", self.block, BLOCKS)
        check_count("tail", self.tail, 0)

    @property
    def newest(self) -> int:
        return self.tail

    def codec(self, dtype: torch.dtype) -> Codec:
        return Integer(bits=self.bits, block=self.block)

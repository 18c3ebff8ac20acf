"""What becomes of tokens that the budget does not keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..parts import check_choice, check_range
from .base import Compressor, part
from .layer_view import LayerView
from .plan import Plan

ROWS = 128  # tokens whose similarities exist at the same time


@part("compressor")
@dataclass(frozen=True, kw_only=True)
class Drop(Compressor):
    """They go."""

    def plan(self, view: LayerView, keep: Tensor) -> Plan:
        return Plan(keep=keep)


@part("compressor")
@dataclass(frozen=True, kw_only=True)
class Merge(Compressor):
    """Each is averaged into the kept token of the same head whose key is most like its own.

    Attributes:
        threshold: cosine of the keys below which a token is dropped instead.
        keys: average the keys, too, not the values alone.

    Source: the averaged merge of LOOK-M, arXiv 2406.18139. Keys are averaged as they are stored,
    rotated, as there.
    """

    per_token: ClassVar[bool] = True

    threshold: float = -1.0
    keys: bool = True

    def __post_init__(self) -> None:
        check_range("threshold", self.threshold, -1, 1)
        check_choice("keys", self.keys, (True, False))

    def plan(self, view: LayerView, keep: Tensor) -> Plan:
        directions = F.normalize(view.keys.float(), dim=-1)
        into = torch.full(keep.shape, -1, dtype=torch.int64, device=keep.device)
        for start in range(0, keep.shape[2], ROWS):
            rows = slice(start, start + ROWS)
            likeness = directions[:, :, rows] @ directions.transpose(-1, -2)
            best, place = likeness.masked_fill(~keep[:, :, None], -2.0).max(-1)
            into[..., rows] = place.where(best >= self.threshold, -1)
        gone = view.live.expand_as(keep) & ~keep
        return Plan(keep=keep, into=into.where(gone, -1), merge_keys=self.keys)


@part("compressor")
@dataclass(frozen=True, kw_only=True)
class Compensate(Compressor):
    """One slot per head stands for all of them: their mean, weighted by their number.

    It counts as a token of the budget.

    Source: the compensation token of RazorAttention, arXiv 2407.15891.
    """

    extra: ClassVar[int] = 1
    per_token: ClassVar[bool] = True

    def plan(self, view: LayerView, keep: Tensor) -> Plan:
        return Plan(keep=keep, summary=True)


@part("compressor")
@dataclass(frozen=True, kw_only=True)
class Quantise(Compressor):
    """They stay, in few bits; what the budget keeps stays as the storage has it.

    Attributes:
        bits: 8, 4 or 2.
        block: size of the Hadamard blocks, 0 for none.

    Source: salient tokens in more bits than the others, as in ZipCache, arXiv 2405.14256.
    """

    nature: ClassVar[str] = "bounded"

    bits: int = 4
    block: int = 64

    def __post_init__(self) -> None:
        check_choice("bits", self.bits, (8, 4, 2))
        check_choice("block", self.block, (0, 16, 32, 64, 128, 256))

    def plan(self, view: LayerView, keep: Tensor) -> Plan:
        low = view.live.expand_as(keep) & ~keep
        return Plan(keep=keep, low=low, bits=self.bits, block=self.block)

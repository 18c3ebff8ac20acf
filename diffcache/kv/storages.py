"""In which form kept tokens lie."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Storage, part
from .bits import Codec


@part("storage")
@dataclass(frozen=True, kw_only=True)
class Contiguous(Storage):
    """One rectangle per layer, as it comes; heads or rows with fewer tokens have holes."""

    def codec(self, dtype: torch.dtype) -> Codec:
        return Codec()

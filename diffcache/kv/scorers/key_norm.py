"""Key norm: short keys are worth keeping.

Source: arXiv 2406.11430, which finds that keys of small norm attract attention.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..base import Scorer, part
from ..layer_view import LayerView


@part("scorer")
@dataclass(frozen=True, kw_only=True)
class KeyNorm(Scorer):
    """The negative length of each key."""

    def score(self, view: LayerView) -> Tensor:
        length: Tensor = torch.linalg.vector_norm(view.keys.float(), dim=-1)
        return -length

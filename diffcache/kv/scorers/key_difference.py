"""Key difference: keys unlike the others are worth keeping.

Source: KeyDiff, arXiv 2504.15364: the negative cosine to the mean of the normalised keys.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ...parts import check_count, check_range
from ..base import Scorer, part
from ..layer_view import LayerView
from .window_attention import pool_tokens


@part("scorer")
@dataclass(frozen=True, kw_only=True)
class KeyDifference(Scorer):
    """-cos(key, mean of the layer's normalised keys), per head.

    Attributes:
        neighbours: share of the mean score over `kernel` neighbouring tokens that is added, so
            that strings of tokens stay together (0 as published).
        kernel: how many neighbours, odd.
    """

    neighbours: float = 0.0
    kernel: int = 7

    def __post_init__(self) -> None:
        check_range("neighbours", self.neighbours, 0)
        check_count("kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, got {self.kernel}")

    def score(self, view: LayerView) -> Tensor:
        live = view.live[..., None]
        keys = F.normalize(view.keys.float(), dim=-1).masked_fill(~live, 0.0)
        mean = keys.sum(-2, keepdim=True) / live.sum(-2, keepdim=True).clamp(min=1)
        scores = -F.cosine_similarity(keys, mean, dim=-1)
        if not self.neighbours:
            return scores
        return scores + self.neighbours * pool_tokens(scores, self.kernel, "avg")

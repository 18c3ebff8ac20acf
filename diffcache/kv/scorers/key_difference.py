"""Key difference: keys unlike the others are worth keeping.

Source: KeyDiff, arXiv 2504.15364: the negative cosine to the mean of the normalised keys.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..base import Scorer, part
from ..layer_view import LayerView


@part("scorer")
@dataclass(frozen=True, kw_only=True)
class KeyDifference(Scorer):
    """-cos(key, mean of the layer's normalised keys), per head."""

    def score(self, view: LayerView) -> Tensor:
        live = view.live[..., None]
        keys = F.normalize(view.keys.float(), dim=-1).masked_fill(~live, 0.0)
        mean = keys.sum(-2, keepdim=True) / live.sum(-2, keepdim=True).clamp(min=1)
        return -F.cosine_similarity(keys, mean, dim=-1)

"""Window attention: what the last queries of the prompt look at.

Source: SnapKV, arXiv 2404.14469: window 64, average pooling over 5 tokens; TOVA, arXiv
2401.06104: the last query alone, averaged over the heads.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...parts import check_choice, check_count, check_range
from ..attention import weights
from ..base import Scorer, part
from ..layer_view import LayerView


@part("scorer")
@dataclass(frozen=True, kw_only=True)
class WindowAttention(Scorer):
    """Mean attention of the last `window` true queries, pooled along the tokens.

    Attributes:
        window: how many queries; their own tokens rank above all others.
        pool: "avg" or "max" over `kernel` neighbouring tokens (odd; 1 for none).
        heads: "each" key head by itself, or "all" heads the same mean.
        variance: how often the variance over the queries is added (CAKE's gamma).
    """

    window: int = 64
    kernel: int = 5
    pool: str = "avg"
    heads: str = "each"
    variance: float = 0.0

    def __post_init__(self) -> None:
        check_count("window", self.window, 1)
        check_count("kernel", self.kernel, 1)
        check_choice("pool", self.pool, ("avg", "max"))
        check_choice("heads", self.heads, ("each", "all"))
        check_range("variance", self.variance, 0)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, got {self.kernel}")

    @property
    def queries(self) -> int:
        return self.window

    def score(self, view: LayerView) -> Tensor:
        shares = weights(view, view.queries, view.query_index)
        queries = (view.query_index >= 0).sum(-1).clamp(min=1)[:, None, None, None]
        scores = mean = shares.sum(3) / queries  # [batch, heads, group, slots]
        if self.variance:
            # Rows of padding are zeros, so the mean square needs no mask.
            moves = (shares.square().sum(3) / queries - mean.square()).clamp(min=0)
            scores = mean + self.variance * moves
        scores = scores.mean(2)
        if self.heads == "all":
            scores = scores.mean(1, keepdim=True).expand_as(scores)
        first = torch.where(view.query_index >= 0, view.query_index, 2**62).amin(-1)
        inside = (view.index >= first[:, None, None]).expand_as(scores)
        pooled = pool_tokens(scores.masked_fill(inside, 0.0), self.kernel, self.pool)
        return pooled.masked_fill(inside, 2.0 + self.variance)  # nothing else is as high


def pool_tokens(scores: Tensor, kernel: int, pool: str) -> Tensor:
    """[batch, heads, slots] pooled over `kernel` neighbours; beyond the ends are zeros."""
    if kernel == 1:
        return scores
    if pool == "avg":
        return F.avg_pool1d(scores, kernel, stride=1, padding=kernel // 2)
    return F.max_pool1d(scores, kernel, stride=1, padding=kernel // 2)

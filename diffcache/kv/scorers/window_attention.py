"""Window attention: what the last queries of the prompt look at.

Source: SnapKV, arXiv 2404.14469: window 64, average pooling over 5 tokens; TOVA, arXiv
2401.06104: the last query alone, averaged over the heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...parts import check_choice, check_count, check_range
from ..attention import weights
from ..base import Scorer, part
from ..layer_view import LayerView
from ..pooling import pool_tokens


@part("scorer")
@dataclass(frozen=True, kw_only=True)
class WindowAttention(Scorer):
    """Mean attention of the last `window` true queries, pooled along the tokens.

    Attributes:
        window: how many queries; their own tokens rank with the best of the others.
        pool: "avg" or "max" over `kernel` neighbouring tokens (odd; 1 for none).
        group: "mean", "max" or "sum" over the query heads of a key head.
        heads: "each" key head by itself, or "all" heads the same mean.
        variance: how often the variance over the queries is added (CAKE's gamma).
    """

    window: int = 64
    kernel: int = 5
    pool: str = "avg"
    group: str = "mean"
    heads: str = "each"
    variance: float = 0.0

    def __post_init__(self) -> None:
        check_count("window", self.window, 1)
        check_count("kernel", self.kernel, 1)
        check_choice("pool", self.pool, ("avg", "max"))
        check_choice("group", self.group, ("mean", "max", "sum"))
        check_choice("heads", self.heads, ("each", "all"))
        check_range("variance", self.variance, 0)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, got {self.kernel}")

    @property
    def queries(self) -> int:
        return self.window

    def score(self, view: LayerView) -> Tensor:
        index = view.query_index[:, -self.window :]
        shares = weights(view, view.queries[:, :, -self.window :], index)
        queries = (index >= 0).sum(-1).clamp(min=1)[:, None, None, None]
        scores = mean = shares.sum(3) / queries  # [batch, heads, group, slots]
        if self.variance:
            # Rows of padding are zeros, so the mean square needs no mask.
            moves = (shares.square().sum(3) / queries - mean.square()).clamp(min=0)
            scores = mean + self.variance * moves
        scores = reduced(scores, self.group)
        if self.heads == "all":
            scores = scores.mean(1, keepdim=True).expand_as(scores)
        first = torch.where(index >= 0, index, 2**62).amin(-1)
        inside = (view.index >= first[:, None, None]).expand_as(scores)
        pooled = pool_tokens(scores.masked_fill(inside, 0.0), self.kernel, self.pool)
        return torch.where(inside, pooled.amax(-1, keepdim=True), pooled)


def reduced(scores: Tensor, how: str) -> Tensor:
    """[batch, heads, group, slots] over the group."""
    if how == "max":
        return scores.amax(2)
    return scores.mean(2) if how == "mean" else scores.sum(2)

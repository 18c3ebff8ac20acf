"""Scores pooled along the tokens."""

import torch.nn.functional as F
from torch import Tensor


def pool_tokens(scores: Tensor, kernel: int, pool: str) -> Tensor:
    """[batch, heads, slots] pooled, "avg" or "max", over `kernel` slots; beyond are zeros."""
    if kernel == 1:
        return scores
    if pool == "avg":
        return F.avg_pool1d(scores, kernel, stride=1, padding=kernel // 2)
    return F.max_pool1d(scores, kernel, stride=1, padding=kernel // 2)

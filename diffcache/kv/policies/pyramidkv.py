"""PyramidKV: SnapKV's score; many tokens in the first layers, few in the last.

Source: arXiv 2406.02069: beta 20, window 8, pooling over 5 tokens as in SnapKV.
"""

from ..budgets import Pyramid
from ..named import register
from ..policy import KVPolicy
from ..protection import Boundaries
from ..scorers.window_attention import WindowAttention


@register
def PyramidKV(keep: float = 0.5, beta: float = 20.0, window: int = 8) -> KVPolicy:
    """Args: keep: fraction kept on average; beta: mean over last layer; window: queries seen."""
    return KVPolicy(
        name="pyramidkv",
        summary="SnapKV's score, layers falling in size",
        source="arXiv 2406.02069",
        scorer=WindowAttention(window=window, kernel=5),
        budget=Pyramid(keep=keep, beta=beta),
        protection=Boundaries(sinks=4, recent=window),
    )

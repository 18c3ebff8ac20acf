"""SnapKV: what the last queries of the prompt look at.

Source: arXiv 2404.14469: window 64, average pooling over 5 tokens, the window itself kept.
Differs: 4 sinks are protected, too, as protection is on by default here.
"""

from ..budgets import Uniform
from ..named import register
from ..policy import KVPolicy
from ..protection import Boundaries
from ..scorers.window_attention import WindowAttention


@register
def SnapKV(keep: float = 0.5, window: int = 64, kernel: int = 5) -> KVPolicy:
    """Args: keep: fraction of the tokens kept; window, kernel: queries seen, tokens pooled."""
    return KVPolicy(
        name="snapkv",
        summary="tokens that the last queries of the prompt attend to",
        source="arXiv 2404.14469",
        scorer=WindowAttention(window=window, kernel=kernel),
        budget=Uniform(keep=keep),
        protection=Boundaries(sinks=4, recent=window),
    )

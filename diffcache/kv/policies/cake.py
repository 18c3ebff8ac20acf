"""CAKE: layers share the budget by how spread out and restless their attention is.

Source: arXiv 2503.12491: mean and variance of the last queries' attention, pooled over 5 tokens;
each layer's share from entropy and variance; layers shrink as the next ones arrive.
Differs: both powers of the preference are 1 (the paper tunes them per model); 4 sinks are
protected, too.
"""

from ..budgets import Cascade
from ..named import register
from ..policy import KVPolicy
from ..protection import Boundaries
from ..scorers.window_attention import WindowAttention


@register
def CAKE(keep: float = 0.5, window: int = 32, gamma: float = 200.0) -> KVPolicy:
    """Args: keep: fraction kept; window: queries seen; gamma: weight of the variance."""
    return KVPolicy(
        name="cake",
        summary="layers with restless attention get more of the budget",
        source="arXiv 2503.12491",
        scorer=WindowAttention(window=window, variance=gamma),
        budget=Cascade(keep=keep, window=window),
        protection=Boundaries(sinks=4, recent=window),
    )

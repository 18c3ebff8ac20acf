"""H2O: tokens that received the most attention so far, and recent ones.

Source: arXiv 2306.14048: half of the budget for each, decided at every step.
"""

from ..budgets import Uniform
from ..named import register
from ..policy import KVPolicy
from ..protection import RecentShare
from ..scorers.accumulated_attention import AccumulatedAttention
from ..triggers import EverySteps


@register
def H2O(keep: float = 0.5, recent: float = 0.5) -> KVPolicy:
    """Args: keep: fraction of the tokens kept; recent: share of the budget for the last ones."""
    return KVPolicy(
        name="h2o",
        summary="tokens that received the most attention, and recent ones",
        source="arXiv 2306.14048",
        scorer=AccumulatedAttention(),
        budget=Uniform(keep=keep),
        protection=RecentShare(share=recent),
        trigger=EverySteps(steps=1),
    )

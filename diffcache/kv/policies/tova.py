"""TOVA: what the last query looks at, the same tokens for all heads of a layer.

Source: arXiv 2401.06104: no sinks, no window, decided at every step.
"""

from ..budgets import Uniform
from ..named import register
from ..policy import KVPolicy
from ..protection import Boundaries
from ..scorers.window_attention import WindowAttention
from ..triggers import EverySteps


@register
def TOVA(keep: float = 0.5) -> KVPolicy:
    """Args: keep: fraction of the tokens kept."""
    return KVPolicy(
        name="tova",
        summary="tokens that the last query attends to, the same for all heads",
        source="arXiv 2401.06104",
        scorer=WindowAttention(window=1, kernel=1, heads="all"),
        budget=Uniform(keep=keep),
        protection=Boundaries(sinks=0, recent=1),
        trigger=EverySteps(steps=1),
    )

"""StreamingLLM: sinks and the most recent tokens.

Source: arXiv 2309.17453, 4 sinks.
Differs: tokens keep their true positions; the paper numbers them within the cache.
"""

from ..budgets import Uniform
from ..named import register
from ..policy import KVPolicy
from ..protection import Boundaries
from ..scorers.position import Position


@register
def StreamingLLM(keep: float = 0.5, sinks: int = 4) -> KVPolicy:
    """Args: keep: fraction of the tokens kept; sinks: first tokens that stay."""
    return KVPolicy(
        name="streamingllm",
        summary="sinks and the most recent tokens",
        source="arXiv 2309.17453",
        scorer=Position(),
        budget=Uniform(keep=keep),
        protection=Boundaries(sinks=sinks, recent=0),
    )

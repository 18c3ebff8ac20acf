"""Expected attention: what queries like those of the prompt would look at later.

Source: arXiv 2510.00636; public code: 512 future positions, 4 sinks, eps 0.
Differs: eps 0.01, without which tokens of little attention are told apart by their values alone
and exact answers are lost.
"""

from ..budgets import Uniform
from ..named import register
from ..policy import KVPolicy
from ..protection import Boundaries
from ..scorers.expected_attention import ExpectedAttentionScore


@register
def ExpectedAttention(keep: float = 0.5, eps: float = 0.01, future: int = 512) -> KVPolicy:
    """Args: keep: fraction kept; eps: added to the score; future: positions averaged over."""
    return KVPolicy(
        name="expectedattention",
        summary="tokens that queries like the prompt's would attend to later",
        source="arXiv 2510.00636",
        scorer=ExpectedAttentionScore(eps=eps, future=future),
        budget=Uniform(keep=keep),
        protection=Boundaries(sinks=4, recent=8),
    )

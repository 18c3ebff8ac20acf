"""KeyDiff: tokens whose keys differ most from the others'.

Source: arXiv 2504.15364.
Differs: 4 sinks and 8 recent tokens are protected, as protection is on by default here.
"""

from ..budgets import Uniform
from ..named import register
from ..policy import KVPolicy
from ..scorers.key_difference import KeyDifference


@register
def KeyDiff(keep: float = 0.5) -> KVPolicy:
    """Args: keep: fraction of the tokens kept."""
    return KVPolicy(
        name="keydiff",
        summary="tokens whose keys differ most from the mean key",
        source="arXiv 2504.15364",
        scorer=KeyDifference(),
        budget=Uniform(keep=keep),
    )

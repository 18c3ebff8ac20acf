"""AdaKV: heads of a layer share its budget by their best tokens; around any scorer.

Source: arXiv 2407.11550, safeguard 0.2.
Differs: heads really hold different numbers of tokens, in ragged storage; KeyDiff's score, not
SnapKV's, unless another is given; 4 sinks and 8 recent tokens are protected.
"""

from typing import Any

from ..base import Scorer
from ..budgets import HeadTopK
from ..named import register
from ..policy import KVPolicy
from ..scorers.key_difference import KeyDifference
from ..storages import Ragged


@register
def AdaKV(keep: float = 0.5, scorer: Scorer | None = None, safeguard: float = 0.2) -> KVPolicy:
    """Args: keep: fraction kept on average; scorer: any; safeguard: share each head keeps."""
    chosen: Any = KeyDifference() if scorer is None else scorer
    return KVPolicy(
        name="adakv",
        summary="the best tokens of all heads of a layer, heads of different lengths",
        source="arXiv 2407.11550",
        scorer=chosen,
        budget=HeadTopK(keep=keep, safeguard=safeguard),
        storage=Ragged(),
    )

"""The KV presets exact, quality, balanced and fast: our compositions.

`exact` evicts and codes nothing. The others share one recipe: KeyDiff's score, smoothed over seven
neighbours so that numbers and names stay together, and the heads of a layer sharing its budget.
The fractions are not yet measured on a trained model.
"""

from ..base import Storage
from ..budgets import HeadTopK, Uniform
from ..named import register
from ..policy import KVPolicy
from ..scorers.combined import Smoothed
from ..scorers.key_difference import KeyDifference
from ..scorers.position import Position
from ..storages import Quantised, Ragged


@register
def Exact() -> KVPolicy:
    """Everything stays as it is; the report says what a full cache holds."""
    return KVPolicy(
        name="exact",
        summary="nothing is evicted or coded",
        scorer=Position(),
        budget=Uniform(keep=1.0),
    )


@register
def Quality(keep: float = 0.5) -> KVPolicy:
    """Args: keep: fraction of the tokens kept, in full precision."""
    return _recipe("quality", "half of the tokens, in full precision", keep, Ragged())


@register
def Balanced(keep: float = 0.4) -> KVPolicy:
    """Args: keep: fraction of the tokens kept, in eight bits."""
    return _recipe("balanced", "two fifths of the tokens, in eight bits", keep, Quantised(bits=8))


@register
def Fast(keep: float = 0.25) -> KVPolicy:
    """Args: keep: fraction of the tokens kept, in full precision: nothing to decode at a step."""
    return _recipe("fast", "a quarter of the tokens, in full precision", keep, Ragged())


def _recipe(name: str, summary: str, keep: float, storage: Storage) -> KVPolicy:
    return KVPolicy(
        name=name,
        summary=summary,
        scorer=Smoothed(scorer=KeyDifference()),
        budget=HeadTopK(keep=keep),
        storage=storage,
    )

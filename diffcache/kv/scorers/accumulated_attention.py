"""Accumulated attention: what every query so far looked at.

Source: H2O, arXiv 2306.14048 (the sum); ZipCache, arXiv 2405.14256 (divided by the number of
queries that could see the token).
"""

from dataclasses import dataclass

from torch import Tensor

from ...parts import check_choice
from ..base import Scorer, part
from ..layer_view import LayerView


@part("scorer")
@dataclass(frozen=True, kw_only=True)
class AccumulatedAttention(Scorer):
    """The attention that each token ever received, summed pass by pass and pruned with the cache.

    Attributes:
        normalise: divide by the number of queries that could see the token.
    """

    normalise: bool = False

    def __post_init__(self) -> None:
        check_choice("normalise", self.normalise, (True, False))

    @property
    def accumulates(self) -> bool:
        return True

    def score(self, view: LayerView) -> Tensor:
        assert view.received is not None
        if not self.normalise:
            return view.received
        return view.received / (view.seen[:, None, None] - view.order).clamp(min=1)

"""Position: newer is better.

Source: StreamingLLM, arXiv 2309.17453 (with sinks protected).
"""

from dataclasses import dataclass

from torch import Tensor

from ..base import Scorer, part
from ..layer_view import LayerView


@part("scorer")
@dataclass(frozen=True, kw_only=True)
class Position(Scorer):
    """The column of each token, so the oldest go first."""

    def score(self, view: LayerView) -> Tensor:
        return view.index.float().expand(-1, view.keys.shape[1], -1)

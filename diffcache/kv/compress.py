"""What becomes of tokens that the budget does not keep."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .base import Compressor, part
from .layer_view import LayerView
from .plan import Plan


@part("compressor")
@dataclass(frozen=True, kw_only=True)
class Drop(Compressor):
    """They go."""

    def plan(self, view: LayerView, keep: Tensor) -> Plan:
        return Plan(keep=keep)

"""Role decay: each kind of token has a worth that fades with age and is refreshed by attention.

Source: MemDecay; its abstract gives worth per region, exponential decay and refresh, not the
formula of the refresh, which is ours.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...parts import check_range
from ..base import Scorer, part
from ..layer_view import LayerView


@part("scorer")
@dataclass(frozen=True, kw_only=True)
class RoleDecay(Scorer):
    """worth[role] * exp(-decay[role] * age) + refresh * share of the attention received.

    Age is in tokens. The share is that among the head's tokens, times their number, so 1 is the
    mean.

    Attributes:
        worth, decay: one number for each role, by the role's number; the last one serves all
            roles beyond, and role 0 is that of tokens without any.
        refresh: weight of the attention; 0 does without measuring it.
    """

    worth: tuple[float, ...] = (1.0,)
    decay: tuple[float, ...] = (0.01,)
    refresh: float = 0.1

    def __post_init__(self) -> None:
        for name in ("worth", "decay"):
            if not getattr(self, name):
                raise ValueError(f"{name} must have at least one number")
            for number in getattr(self, name):
                check_range(f"each of {name}", number, 0)
        check_range("refresh", self.refresh, 0)

    @property
    def accumulates(self) -> bool:
        return self.refresh > 0

    def score(self, view: LayerView) -> Tensor:
        age = (view.seen[:, None, None] - 1 - view.order).clamp(min=0)
        roles = torch.zeros_like(view.index)
        if view.timeline.roles is not None:
            roles = view.per_token(view.timeline.roles).long()
        worth, decay = (_table(numbers, roles) for numbers in (self.worth, self.decay))
        scores = (worth * torch.exp(-decay * age)).expand(-1, view.stored_heads, -1)
        if view.received is None or not self.refresh:
            return scores
        received = view.received.masked_fill(~view.live, 0.0)
        total = received.sum(-1, keepdim=True).clamp(min=1e-12)
        return scores + self.refresh * received / total * view.live.sum(-1, keepdim=True)


def _table(numbers: tuple[float, ...], roles: Tensor) -> Tensor:
    table = torch.tensor(numbers, device=roles.device)
    return table[roles.clamp(max=len(numbers) - 1)]

"""How many tokens each layer and each head may keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..parts import check_count, check_range
from .apportion import apportion
from .attention import weights
from .base import Budget, part
from .layer_view import LayerView


@part("budget")
@dataclass(frozen=True, kw_only=True)
class Uniform(Budget):
    """Every head of every layer the same number."""


@part("budget")
@dataclass(frozen=True, kw_only=True)
class Pyramid(Budget):
    """Many in the first layers, few in the last, falling in equal steps.

    Attributes:
        beta: beside what is protected the last layer keeps the mean over `beta`; the first keeps
            what then makes up the mean.

    Source: PyramidKV, arXiv 2406.02069, beta 20. Where the first layers would keep more than
    there is, the others take what is left over.
    """

    beta: float = 20.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("beta", self.beta, 1)

    def split(self, target: Tensor, scores: Tensor, view: LayerView) -> Tensor:
        layers = view.facts.num_layers
        safe = (scores == float("inf")).sum(-1).amax(1)  # outside the pyramid, as the window is
        least = safe + (target - safe).clamp(min=0).double() / self.beta
        steps = torch.linspace(1, 0, layers, dtype=torch.double, device=target.device)
        shares = least[:, None] + 2 * (target - least)[:, None] * steps
        limit = view.seen[:, None].expand(-1, layers)
        counts = apportion(target * layers, shares, limit)[:, view.facts.layer]
        return counts[:, None].expand(-1, scores.shape[1])


@part("budget")
@dataclass(frozen=True, kw_only=True)
class Cascade(Budget):
    """Layers whose attention is spread out and restless get more: entropy and variance.

    After each layer all layers before it shrink to their present share.

    Attributes:
        window: the last queries whose attention is looked at.
        entropy, variance: powers of the two in a layer's preference.

    Source: CAKE, arXiv 2503.12491.
    """

    cascade: ClassVar[bool] = True

    window: int = 32
    entropy: float = 1.0
    variance: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("window", self.window, 1)
        check_range("entropy", self.entropy, 0)
        check_range("variance", self.variance, 0)

    @property
    def queries(self) -> int:
        return self.window

    def preference(self, view: LayerView) -> Tensor:
        n = min(self.window, view.queries.shape[2])
        last = slice(view.queries.shape[2] - n, None)
        shares = weights(view, view.queries[:, :, last], view.query_index[:, last])
        real = (view.query_index[:, last] >= 0)[:, None, None, :, None]
        count = real.sum(3).clamp(min=1)
        spread = -(shares * shares.clamp(min=1e-12).log()).sum(-1).mean((1, 2, 3))
        mean = shares.sum(3, keepdim=True) / count[..., None, :]
        moves = ((shares - mean).square() * real).sum(3) / count
        return spread**self.entropy * moves.sum(-1).mean((1, 2)) ** self.variance


@part("budget")
@dataclass(frozen=True, kw_only=True)
class HeadTopK(Budget):
    """The best tokens of all heads of a layer together, so heads keep different numbers.

    Attributes:
        safeguard: fraction of the mean that every head keeps at any rate.

    Source: AdaKV, arXiv 2407.11550, safeguard 0.2.
    """

    per_head: ClassVar[bool] = True

    safeguard: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("safeguard", self.safeguard, 0, 1)

    def split(self, target: Tensor, scores: Tensor, view: LayerView) -> Tensor:
        batch, heads, slots = scores.shape
        rank = scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        safe = torch.floor(target.double() * self.safeguard).long()
        sure = rank < safe[:, None, None]
        flat = scores.masked_fill(sure & (scores > float("-inf")), float("inf")).flatten(1)
        place = flat.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        chosen = (place < (target * heads)[:, None]) & (flat > float("-inf"))
        return chosen.reshape(batch, heads, slots).sum(-1)


@part("budget")
@dataclass(frozen=True, kw_only=True)
class HeadClasses(Budget):
    """Some heads keep much, the others a little of what is last: retrieval and streaming heads.

    Attributes:
        retrieval: pairs (layer, head), heads those that are stored.
        streaming: tokens of every other head, protected ones included; what is left of the mean
            goes to the retrieval heads of the same layer.

    Source: DuoAttention, arXiv 2410.10819; RazorAttention, arXiv 2407.15891. Which heads are
    which is theirs to find; here it is given.
    """

    per_head: ClassVar[bool] = True

    retrieval: tuple[tuple[int, int], ...] = ()
    streaming: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("streaming", self.streaming, 1)
        for pair in self.retrieval:
            if len(pair) != 2:
                raise ValueError(f"retrieval must be pairs (layer, head), got {pair!r}")

    def split(self, target: Tensor, scores: Tensor, view: LayerView) -> Tensor:
        heads = scores.shape[1]
        mine = [h for layer, h in self.retrieval if layer == view.facts.layer and h < heads]
        shares = torch.zeros(heads, dtype=torch.double, device=target.device)
        shares[mine] = 1.0
        few = torch.minimum(target, torch.full_like(target, self.streaming))
        if not mine:
            return few[:, None].expand(-1, heads)
        limit = view.seen[:, None].expand(-1, heads).where(shares > 0, 0)
        left = target * heads - few * (heads - len(mine))
        more = apportion(left, shares.expand_as(limit), limit)
        return more.where(shares > 0, few[:, None])

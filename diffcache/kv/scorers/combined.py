"""Scorers made of scorers: sums, maxima, gates, neighbours, heads, values.

Each asks for what the scorers in it ask for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...parts import check_choice, check_count, check_range
from ..base import Scorer, build, part
from ..layer_view import LayerView
from ..pooling import pool_tokens
from .position import Position

NORMALISE = ("rank", "softmax", "none")


@dataclass(frozen=True, kw_only=True)
class Combined(Scorer):
    """Base of scorers that look through others."""

    def inner(self) -> tuple[Scorer, ...]:
        raise NotImplementedError

    @property
    def queries(self) -> int:
        return max(scorer.queries for scorer in self.inner())

    @property
    def prompt_queries(self) -> bool:
        return any(scorer.prompt_queries for scorer in self.inner())

    @property
    def accumulates(self) -> bool:
        return any(scorer.accumulates for scorer in self.inner())

    @property
    def rotates(self) -> bool:
        return any(scorer.rotates for scorer in self.inner())

    @property
    def projects(self) -> bool:
        return any(scorer.projects for scorer in self.inner())


@dataclass(frozen=True, kw_only=True)
class Around(Combined):
    """Base of scorers around one other, given as a part, its kind or a mapping."""

    scorer: Scorer = field(default_factory=Position)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scorer", build("scorer", self.scorer))

    def inner(self) -> tuple[Scorer, ...]:
        return (self.scorer,)


@dataclass(frozen=True, kw_only=True)
class Among(Combined):
    """Base of scorers among several others.

    Attributes:
        normalise: "rank" among the layer's tokens (0 to 1, per head), "softmax", or "none".
    """

    scorers: tuple[Scorer, ...]
    normalise: str = "rank"

    def __post_init__(self) -> None:
        object.__setattr__(self, "scorers", tuple(build("scorer", s) for s in self.scorers))
        if not self.scorers:
            raise ValueError("scorers must name at least one scorer")
        check_choice("normalise", self.normalise, NORMALISE)

    def inner(self) -> tuple[Scorer, ...]:
        return self.scorers

    def each(self, view: LayerView) -> list[Tensor]:
        scored = [view.by_stored_head(scorer.score(view)).float() for scorer in self.scorers]
        return [normalised(scores, view, self.normalise) for scores in scored]


@part("scorer")
@dataclass(frozen=True, kw_only=True)
class WeightedSum(Among):
    """The sum of several scores, each times its weight (1 where none are given)."""

    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights and len(self.weights) != len(self.scorers):
            raise ValueError(f"weights must be {len(self.scorers)} numbers, got {self.weights!r}")

    def score(self, view: LayerView) -> Tensor:
        weights = self.weights or (1.0,) * len(self.scorers)
        scored = zip(weights, self.each(view), strict=True)
        return torch.stack([weight * scores for weight, scores in scored]).sum(0)


@part("scorer")
@dataclass(frozen=True, kw_only=True)
class Largest(Among):
    """The largest of several scores."""

    def score(self, view: LayerView) -> Tensor:
        return torch.stack(self.each(view)).amax(0)


@part("scorer")
@dataclass(frozen=True, kw_only=True)
class Gated(Around):
    """The rank of each token, times `factor` for tokens of given roles: 0 sends them last.

    Source: the text prior of LOOK-M, arXiv 2406.18139, which sends images last.
    """

    roles: tuple[int, ...] = ()
    factor: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("factor", self.factor, 0)

    def score(self, view: LayerView) -> Tensor:
        scores = normalised(view.by_stored_head(self.scorer.score(view)).float(), view, "rank")
        if view.timeline.roles is None:
            return scores
        role = view.per_token(view.timeline.roles)
        gated = torch.stack([role == number for number in (*self.roles, -1)]).any(0)
        return torch.where(gated, scores * self.factor, scores)


@part("scorer")
@dataclass(frozen=True, kw_only=True)
class Smoothed(Around):
    """A score plus `share` times its average over `kernel` neighbouring tokens.

    So strings of tokens, numbers and names, stay together.
    """

    share: float = 0.3
    kernel: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("share", self.share, 0)
        check_count("kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, got {self.kernel}")

    def score(self, view: LayerView) -> Tensor:
        scores = self.scorer.score(view).float()
        alive = view.live.expand_as(scores)
        around = pool_tokens(scores.masked_fill(~alive, 0.0), self.kernel, "avg")
        return scores + self.share * around


@part("scorer")
@dataclass(frozen=True, kw_only=True)
class OverHeads(Around):
    """One score for all heads: the mean, maximum or sum over them, or over some of them.

    Attributes:
        how: "mean", "max" or "sum".
        heads: numbers of the heads that count, those that are stored; all where none are given.

    Source: semantic retrieval heads decide for all in CompressKV, arXiv 2508.02401.
    """

    how: str = "mean"
    heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("how", self.how, ("mean", "max", "sum"))
        for head in self.heads:
            check_count("each of heads", head, 0)

    def score(self, view: LayerView) -> Tensor:
        scores = view.by_stored_head(self.scorer.score(view)).float()
        chosen = [head for head in self.heads if head < scores.shape[1]]
        some = scores[:, chosen] if chosen else scores
        one = some.amax(1) if self.how == "max" else some.mean(1)
        one = one * some.shape[1] if self.how == "sum" else one
        return one[:, None].expand_as(scores)


@part("scorer")
@dataclass(frozen=True, kw_only=True)
class ValueWeighted(Around):
    """(score + eps) times the size of what the token's value adds to the output.

    Attributes:
        eps: added first, so that values count where scores are close to zero.
        projected: size after the output projection (L1), else the value's own norm (L2).

    Source: CriticalKV, arXiv 2502.03805 (projected, eps 1e-4). For scores that are not negative.
    """

    eps: float = 1e-4
    projected: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("eps", self.eps, 0)
        check_choice("projected", self.projected, (True, False))

    @property
    def projects(self) -> bool:
        return self.projected or super().projects

    def score(self, view: LayerView) -> Tensor:
        size = projected_size(view) if self.projected else _length(view.values)
        return (self.scorer.score(view).float() + self.eps) * size


def normalised(scores: Tensor, view: LayerView, how: str) -> Tensor:
    """[batch, heads, slots] made comparable among scorers; slots without a token count for none."""
    if how == "none":
        return scores
    alive = view.live.expand_as(scores)
    scores = scores.masked_fill(~alive, float("-inf"))
    if how == "softmax":
        return scores.softmax(-1).nan_to_num(nan=0.0)
    rank = scores.argsort(dim=-1, stable=True).argsort(dim=-1)
    first = (~alive).sum(-1, keepdim=True)
    return (rank - first).clamp(min=0) / alive.sum(-1, keepdim=True).clamp(min=1)


def _length(x: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(x.float(), dim=-1)
    return length


def projected_size(view: LayerView) -> Tensor:
    """[batch, heads, slots]: L1 norm of each value after the output projection, group mean."""
    assert view.facts.output_weight is not None  # asked for by `projects`
    weight = view.facts.output_weight().float()  # [query heads, head_dim, hidden]
    heads = view.values.shape[1]
    grouped = weight.reshape(heads, -1, *weight.shape[1:])
    sizes = [
        torch.stack([(view.values[:, h].float() @ w).abs().sum(-1) for w in grouped[h]]).mean(0)
        for h in range(heads)
    ]
    return torch.stack(sizes, 1)

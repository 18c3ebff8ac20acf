"""Expected attention: what future queries would look at, if they were like those of the prompt.

Source: arXiv 2510.00636; defaults of its public code: 512 future positions, 4 first tokens left
out, covariance and value norm used, eps 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...parts import check_choice, check_count, check_range
from ..base import Scorer, part
from ..layer_view import LayerView


@part("scorer")
@dataclass(frozen=True, kw_only=True)
class ExpectedAttentionScore(Scorer):
    """Softmax of the logits' mean and half their variance over Gaussian future queries.

    Attributes:
        future: how many positions the queries' rotation is averaged over.
        skip: the first real tokens' queries that are left out.
        covariance: use the variance, not the mean alone.
        value_norm: multiply by the norm of the token's value, after adding `eps`.
    """

    future: int = 512
    skip: int = 4
    covariance: bool = True
    value_norm: bool = True
    eps: float = 0.0

    def __post_init__(self) -> None:
        check_count("future", self.future, 1)
        check_count("skip", self.skip, 0)
        check_range("eps", self.eps, 0)
        for name in ("covariance", "value_norm"):
            check_choice(name, getattr(self, name), (True, False))

    @property
    def prompt_queries(self) -> bool:
        return True

    @property
    def rotates(self) -> bool:
        return True

    def score(self, view: LayerView) -> Tensor:
        mean, covariance = self.statistics(view)
        turned = averaged_rotation(view, self.future)[:, None]
        mean = mean[:, :, None] @ turned  # [batch, query heads, 1, head_dim]
        keys = view.keys.float()[:, :, None]  # [batch, heads, 1, slots, head_dim]
        batch, heads, size = keys.shape[0], keys.shape[1], keys.shape[-1]
        grouped = mean.reshape(batch, heads, -1, 1, size)
        logits = (keys * grouped).sum(-1) * view.scaling
        if self.covariance:
            spread = turned.transpose(-1, -2) @ covariance @ turned
            spread = spread.reshape(batch, heads, -1, size, size)
            logits = logits + ((keys @ spread) * keys).sum(-1) * view.scaling**2 / 2
        logits = logits.masked_fill(~view.live[:, :, None], float("-inf"))
        scores: Tensor = logits.softmax(-1).mean(2)
        if not self.value_norm:
            return scores
        length: Tensor = torch.linalg.vector_norm(view.values.float(), dim=-1)
        return (scores + self.eps) * length

    def statistics(self, view: LayerView) -> tuple[Tensor, Tensor]:
        """Mean [batch, query heads, n] and covariance [..., n, n] of queries before rotation."""
        assert view.facts.rotate is not None and view.timeline.positions is not None
        table, index = view.timeline.positions, view.query_index.clamp(min=0)
        positions = torch.stack([axis.gather(1, index) for axis in table]).long()
        queries = view.facts.rotate(view.queries.float(), positions, True)
        assert view.timeline.real is not None
        order = view.timeline.real.cumsum(1).gather(1, index) - 1
        counts = (view.query_index >= 0) & (order >= self.skip)
        # A pass of the first tokens alone has nothing else to go by.
        counts = counts.where(counts.any(1, keepdim=True), view.query_index >= 0)
        use = counts[:, None, :, None].float()
        number = use.sum(2).clamp(min=1)
        mean = (queries * use).sum(2) / number
        apart = (queries - mean[:, :, None]) * use
        return mean, apart.transpose(-1, -2) @ apart / number[..., None]


def averaged_rotation(view: LayerView, future: int) -> Tensor:
    """[batch, head_dim, head_dim]: the mean rotation over the next positions, from the right."""
    assert view.facts.rotate is not None and view.timeline.positions is not None
    table, size = view.timeline.positions, view.queries.shape[-1]
    start = table[..., -1].amax(0) + 1  # text goes on behind the largest axis
    steps = start[:, None] + torch.arange(future, device=table.device)
    positions = steps.expand(table.shape[0], -1, -1).long()
    basis = torch.eye(size, device=table.device)[None, :, None]
    basis = basis.expand(table.shape[1], -1, future, -1)
    return view.facts.rotate(basis, positions, False).mean(2)

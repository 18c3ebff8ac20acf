"""Measures, in one full run, how the size of a model's residuals goes over the noise levels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from . import api
from .context import CallContext
from .features.base import Gate, Metric
from .features.cell import Cell
from .features.magnitudes import as_curve
from .features.predictors import Hold
from .features.probes import SiteInput
from .features.sites import Stack
from .policy import Policy
from .registry import get_policy
from .restore import wrapping_restored

__all__ = ["measure"]

Steps = dict[float, float]  # noise level -> size relative to that of the step before
NEEDS = "magnitudes are measured over the noise levels of flow matching, which no scheduler tells"


def measure(pipe: Any, run: Callable[[], Any], **settings: Any) -> dict[str, Policy]:
    """MagCache with the curve of this pipeline: `wrap(pipe, measure(pipe, run))`.

    Costs one full run. The curve holds for other prompts, step counts and shifts.

    Args:
        pipe: a diffusers pipeline; a wrapped one stays wrapped as it was.
        run: a call of it with the usual number of steps, `lambda: pipe(prompt, ...)`.
        settings: of `magcache`, for instance threshold=0.12.

    Returns:
        A policy for each denoiser that ran, by name.

    Raises:
        ValueError: no flow-matching scheduler, or a run in which no denoiser ran.
    """
    from .pipelines.denoisers import denoisers

    seen: dict[str, dict[str, Steps]] = {name: {} for name in denoisers(pipe)}
    with wrapping_restored(pipe):
        api.wrap(pipe, {name: _recording(branches) for name, branches in seen.items()})
        run()
    ran = {name: branches for name, branches in seen.items() if branches}
    if not ran:
        raise ValueError("no block of a denoiser ran: let run() call the pipeline")
    return {
        name: get_policy(
            "magcache",
            curves=tuple(
                as_curve(branch, list(steps), list(steps.values()))
                for branch, steps in branches.items()
            ),
            **settings,
        )
        for name, branches in ran.items()
    }


def _recording(branches: dict[str, Steps]) -> Policy:
    return Policy(
        name="measuring",
        site=Stack(),
        probe=SiteInput(),
        metric=TokenRatio(),
        gate=Recording(branches=branches),
        predictor=Hold(),
        exact={"front": 0},
    )


@dataclass(frozen=True, kw_only=True)
class TokenRatio(Metric):
    """How much larger each token's residual is than at the step before, in the mean."""

    slot: ClassVar[str] = "metric"
    kind: ClassVar[str] = "token_ratio"

    def measure(self, now: Tensor, reference: Tensor, cell: Cell) -> None:
        return None

    def learn(self, now: Tensor, truth: Tensor, cell: Cell) -> None:
        if cell.history:
            before = cell.history[-1].tensors[0].to(truth.device)
            sizes = [
                torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) for x in (truth, before)
            ]
            cell.numbers["ratio"] = float((sizes[0] / (sizes[1] + 1e-8)).mean())


@dataclass(frozen=True, kw_only=True)
class Recording(Gate):
    """Computes every step and writes its ratio down."""

    slot: ClassVar[str] = "gate"
    kind: ClassVar[str] = "recording"
    branches: dict[str, Steps] = field(default_factory=dict)

    def reuse(self, context: CallContext, value: float | None, cell: Cell) -> bool:
        return False

    def learn(self, context: CallContext, cell: Cell) -> None:
        if context.sigma is None or not 0 <= context.sigma <= 1:
            raise ValueError(NEEDS)
        # The first run of blocks speaks for the others, the first call for a second at its level.
        steps = self.branches.setdefault(context.branch, {})
        steps.setdefault(context.sigma, cell.numbers.get("ratio", 1.0))

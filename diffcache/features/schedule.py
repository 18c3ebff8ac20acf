"""The best table of computed steps, from what a few full runs of a pipeline showed.

A full run leaves the Gram matrix of the model's outputs over its steps; with it, how far any
extrapolation from any two computed steps would have been off is arithmetic. The state of the search
is the last two computed steps, its cost the error summed over every gap, so dynamic programming
finds the optimum of that cost for a given number of computed steps. The cost is a stand-in for
what counts, the distance of the final video: `error_weight` and `worst` are its free numbers, and
`fit` takes the pair whose table is best end to end. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..parts import check_count, check_range
from .base import Predictor
from .cell import Cell
from .predictors import Polynomial

Array = NDArray[np.float64]

ERROR_WEIGHTS = (-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0)
WORST = (2.0, 8.0)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What full runs on one schedule showed.

    Attributes:
        sigmas: of the N steps and the end, N + 1 numbers.
        grams: scalar products of the guided outputs, [clips, N, N], each clip scaled to mean 1 on
            its diagonal.
    """

    sigmas: tuple[float, ...]
    grams: Array

    def __post_init__(self) -> None:
        steps = len(self.sigmas) - 1
        if self.grams.ndim != 3 or self.grams.shape[1:] != (steps, steps):
            raise ValueError(
                f"grams must be [clips, {steps}, {steps}] for {steps} steps, "
                f"got {list(self.grams.shape)}"
            )
        if not np.isfinite(self.grams).all():
            raise ValueError("the recorded outputs are not finite")

    @classmethod
    def of(cls, sigmas: Sequence[float], clips: Iterable[Sequence[Tensor]]) -> Runs:
        """From the outputs of each clip's steps, in order."""
        return cls(sigmas=tuple(sigmas), grams=np.stack([gram(outputs) for outputs in clips]))


def gram(outputs: Sequence[Tensor]) -> Array:
    """Scalar products of the N outputs, [N, N], scaled to mean 1 on the diagonal."""
    rows = torch.stack([output.detach().reshape(-1).to("cpu", torch.float64) for output in outputs])
    products: Array = (rows @ rows.T).numpy()
    return products / max(float(np.diagonal(products).mean()), 1e-300)


def best_steps(
    runs: Runs,
    count: int,
    *,
    predictor: Predictor | None = None,
    error_weight: float = 0.0,
    worst: float = 8.0,
    warmup: int = 3,
    tail: int = 1,
) -> tuple[int, ...]:
    """The `count` steps to compute, ascending, with the least summed error of the others.

    Args:
        runs: what full runs showed.
        count: how many steps are computed, `warmup` first and `tail` last ones among them.
        predictor: one that looks at most two computed steps back; default `Polynomial(order=1)`.
        error_weight: power of the sigma step that each error is multiplied with: 0 counts all
            steps alike, 1 by how far they move the latents.
        worst: exponent of the power mean over clips; the larger, the more the worst clip counts.

    Raises:
        ValueError: a count that does not fit, a predictor that looks further back.
    """
    predictor = Polynomial(order=1) if predictor is None else predictor
    steps = len(runs.sigmas) - 1
    if predictor.depth > 2:
        raise ValueError(f"the search looks two computed steps back, got {predictor.describe()}")
    warmup, tail = max(warmup, 2), max(tail, 1)
    check_count("count", count, min(warmup + tail, steps), steps)
    check_range("worst", worst, 1)
    if count == steps:
        return tuple(range(steps))
    return _search(_gap_costs(runs, predictor, error_weight, worst), count, warmup, tail)


def fit(
    runs: Runs,
    count: int,
    score: Callable[[tuple[int, ...]], float],
    *,
    error_weights: Sequence[float] = ERROR_WEIGHTS,
    worst: Sequence[float] = WORST,
    others: Iterable[tuple[int, ...]] = (),
    warmup: int = 3,
    tail: int = 1,
) -> tuple[tuple[int, ...], float]:
    """The table that scores highest end to end, of those of `best_steps` and `others`; its score.

    Args:
        others: further tables to try, for example the analytic ones.
        score: runs the pipeline with a table and says how good the result is (higher is better):
            for example the mean PSNR of some clips, averaged with that of the worst of them.
    """
    found = [
        best_steps(runs, count, error_weight=power, worst=exponent, warmup=warmup, tail=tail)
        for power, exponent in product(error_weights, worst)
    ]
    scores = {table: score(table) for table in dict.fromkeys([*found, *others])}
    best = max(scores, key=scores.__getitem__)
    return best, scores[best]


def _gap_costs(runs: Runs, predictor: Predictor, power: float, worst: float) -> Array:
    """Cost of skipping all between a and b after computing p and a, [p, a, b]; inf: no such gap."""
    sigmas = np.asarray(runs.sigmas)
    steps = len(sigmas) - 1
    widths = np.abs(np.diff(sigmas))
    weights = (widths / widths.mean()) ** power
    costs = np.full((steps, steps, steps), np.inf)
    for p in range(steps):
        for a in range(p + 1, steps):
            costs[p, a, a + 1 : a + 2] = 0.0
            skipped = np.arange(a + 1, steps - 1)
            errors = _errors(runs, predictor, p, a, skipped) * weights[skipped]
            summed = np.cumsum(errors, axis=1)  # [clips, skipped]
            costs[p, a, a + 2 :] = (summed**worst).mean(0) ** (1 / worst)
    return costs


def _errors(runs: Runs, predictor: Predictor, p: int, a: int, skipped: NDArray[np.int64]) -> Array:
    """Distances of the predictions for the steps `skipped` from the truth, [clips, skipped]."""
    sigmas, grams = runs.sigmas, runs.grams
    times = [sigmas[p], sigmas[a]]
    blank: Cell = None  # type: ignore[assignment]  # predictors of fixed order look at no cell
    rows = [predictor.weights(times[-predictor.depth :], sigmas[k], blank) for k in skipped]
    pairs = np.asarray([[0.0] * (2 - len(row)) + row for row in rows]).reshape(-1, 2)
    before, last = pairs[:, 0], pairs[:, 1]
    square = (
        grams[:, skipped, skipped]
        + last**2 * grams[:, [a], [a]]
        + before**2 * grams[:, [p], [p]]
        + 2 * last * before * grams[:, [p], [a]]
        - 2 * last * grams[:, a, skipped]
        - 2 * before * grams[:, p, skipped]
    )
    distances: Array = np.sqrt(np.clip(square, 0.0, None))
    return distances


def _search(costs: Array, count: int, warmup: int, tail: int) -> tuple[int, ...]:
    """The cheapest path through states (last but one, last computed step)."""
    steps = costs.shape[0]
    value = np.full((steps, steps), np.inf)
    value[warmup - 2, warmup - 1] = 0.0
    trace: list[NDArray[np.int64]] = []
    first_of_tail = steps - tail
    for _ in range(count - warmup - (tail - 1)):
        total = value[:, :, None] + costs  # [p, a, b]
        trace.append(total.argmin(0))
        value = total.min(0)
    path = [first_of_tail, int(value[:, first_of_tail].argmin())]
    for choice in reversed(trace):
        path.append(int(choice[path[-1], path[-2]]))
    return tuple(sorted({*path, *range(warmup), *range(first_of_tail, steps)}))

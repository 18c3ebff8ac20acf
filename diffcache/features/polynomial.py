"""Interpolation and extrapolation as weights over known values."""

from __future__ import annotations

from collections.abc import Sequence


def lagrange_weights(times: Sequence[float], time: float, order: int) -> list[float]:
    """Weights of the polynomial of degree `order` through the newest order + 1 of `times`, read at
    `time`.

    With fewer times the degree falls; older entries get weight 0. `times` are distinct.
    """
    used = list(times[-(order + 1) :])
    weights = []
    for i, here in enumerate(used):
        weight = 1.0
        for j, other in enumerate(used):
            if j != i:
                weight *= (time - other) / (here - other)
        weights.append(weight)
    return [0.0] * (len(times) - len(used)) + weights

"""Pays back, at a computed step, what the predictions before it got wrong.

A skipped step moves the latents by (width of the step) x (predicted output). At the next computed
step the truth is known at both ends of the gap, so the outputs in between are known better than
when they were predicted. The difference, summed over the gap with each step's width and divided by
the present width, is added to the computed output that is handed out; the history keeps the truth.
For a solver of dx/dsigma = output this turns an explicit multistep rule into an implicit one, as a
predictor-corrector does, and costs no forward. Source: own; Adams-Moulton methods have the formula.
"""

from __future__ import annotations

from dataclasses import dataclass

from .polynomial import lagrange_weights


@dataclass(frozen=True, slots=True)
class Prediction:
    """One skipped step: its time, how far time moved in it, and the weights over the history."""

    time: float
    width: float
    weights: list[float]


def owed_weights(
    times: list[float], time: float, width: float, predictions: list[Prediction]
) -> list[float]:
    """Weights of the correction over the remembered outputs (at `times`) and the one at `time`.

    Args:
        times: of the history that all predictions were made from, oldest first.
        width: how far time moves in the computed step; not 0.

    Returns:
        len(times) + 1 weights; the last is of the output just computed.
    """
    owed = [0.0] * (len(times) + 1)
    for made in predictions:
        better = lagrange_weights([*times, time], made.time, order=1)
        for i, weight in enumerate([*made.weights, 0.0]):
            owed[i] += made.width * (better[i] - weight) / width
    return owed

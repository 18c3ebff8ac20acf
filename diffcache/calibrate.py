"""Calibration: a few full runs of a pipeline, and the table of computed steps fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from . import api
from .api import _denoisers, _state
from .context import CallContext
from .denoiser import Denoiser
from .features.schedule import ERROR_WEIGHTS, WORST, Runs, fit
from .policy import Policy
from .registry import get_policy
from .restore import wrapping_restored

__all__ = ["calibrate", "record"]

Run = Callable[[], Any]
NEEDS = "calibration needs a pipeline with a flow-matching scheduler"


@dataclass(slots=True)
class Trace:
    """The outputs of one denoiser in one full run."""

    levels: tuple[float, ...] = ()
    end: float = 0.0  # the noise level after the last step
    outputs: dict[str, dict[int, Tensor]] = field(default_factory=dict)  # branch -> place -> output
    scales: dict[int, float] = field(default_factory=dict)  # place -> guidance scale at that step

    def guided(self) -> list[Tensor]:
        """What the scheduler was handed at each step: uncond + g (cond - uncond), or the output."""
        cond, uncond = self.outputs.get("cond"), self.outputs.get("uncond", {})
        if cond is None:  # passes without names: all of them, side by side
            return [torch.cat(found, dim=-1) for found in self._steps()]
        return [
            torch.lerp(uncond[place], cond[place], self.scales[place])
            if place in uncond
            else cond[place]
            for place in sorted(cond)
        ]

    def _steps(self) -> list[list[Tensor]]:
        places = sorted(next(iter(self.outputs.values())))
        return [[b[place] for b in self.outputs.values() if place in b] for place in places]

    @property
    def sigmas(self) -> tuple[float, ...]:
        """Noise levels of the steps served, and the one after them."""
        places = sorted(next(iter(self.outputs.values())))
        after = places[-1] + 1
        return (
            *(self.levels[place] for place in places),
            self.levels[after] if after < len(self.levels) else self.end,
        )


def record(pipe: Any, runs: Sequence[Run]) -> dict[str, Runs]:
    """Makes full runs and keeps the scalar products of the guided outputs, for each denoiser.

    Args:
        pipe: a diffusers pipeline; a wrapped one stays wrapped as it was.
        runs: calls of it, `lambda: pipe(prompt, generator=torch.Generator().manual_seed(0), ...)`,
            with the same scheduler settings; each item of a batch counts as a clip.

    Raises:
        ValueError: no runs, no flow-matching scheduler, or schedules that differ between the runs.
    """
    with wrapping_restored(pipe):
        return _runs([_traced(pipe, run)[0] for run in runs])


def calibrate(
    pipe: Any,
    runs: Sequence[Run],
    *,
    policy: str | Policy = "forecast",
    fraction: float | None = None,
    error_weights: Sequence[float] = ERROR_WEIGHTS,
    worst: Sequence[float] = WORST,
) -> Policy:
    """A policy whose table of computed steps is the best found for this pipeline.

    Costs one full run of each of `runs`, one more of the first, and one cached run of each for
    every different table that the search proposes (fourteen at most). The table is chosen by the
    PSNR of what the runs return against their full runs; mean and worst clip count alike.

    Args:
        pipe, runs: as for `record`; each run must repeat itself, so make its generator within.
        policy: the policy to start from, with a `SigmaTable` gate.
        fraction: share of the steps to compute; default the policy's.

    Raises:
        ValueError: as `record`; a policy without such a gate; a run that does not repeat itself.
    """
    start = get_policy(policy)
    if start.gate.kind != "sigma_table":
        raise ValueError(
            f"calibration fits the gate 'sigma_table', {start.name!r} has {start.gate.kind!r}"
        )
    share: float = start.settings()["fraction"] if fraction is None else fraction
    start = start.with_settings(fraction=share)
    sigmas: list[float] = []
    with wrapping_restored(pipe):
        traced = [_traced(pipe, run) for run in runs]
        _check_repeats(pipe, runs[0], traced[0][0])
        truths = [pixels(result) for _, result in traced]
        recorded = _runs([trace for trace, _ in traced])
        for name, seen in recorded.items():
            sigmas += _fitted(pipe, runs, truths, start, name, seen, error_weights, worst)
    return start.with_settings(sigmas=tuple(sigmas))


def _fitted(
    pipe: Any,
    runs: Sequence[Run],
    truths: Sequence[Tensor],
    start: Policy,
    name: str,
    seen: Runs,
    error_weights: Sequence[float],
    worst: Sequence[float],
) -> list[float]:
    """The noise levels to compute in one denoiser; others compute all while it is looked at."""
    steps, ends = len(seen.sigmas) - 1, start.guards.warmup_steps + start.guards.tail_steps

    def levels(table: tuple[int, ...]) -> tuple[float, ...]:
        return tuple(seen.sigmas[step] for step in table)

    def score(table: tuple[int, ...]) -> float:
        api.wrap(pipe, "exact")
        api.wrap(pipe, {name: start.with_settings(sigmas=levels(table))})
        found = torch.cat(
            [decibel(pixels(run()), full) for run, full in zip(runs, truths, strict=True)]
        )
        return float(found.mean() + found.min()) / 2

    table, _ = fit(
        seen,
        min(steps, max(round(start.settings()["fraction"] * steps), ends)),
        score,
        error_weights=error_weights,
        worst=worst,
        warmup=start.guards.warmup_steps,
        tail=start.guards.tail_steps,
    )
    return list(levels(table))


def pixels(result: Any) -> Tensor:
    """What a pipeline returned (frames, images or latents) as one tensor, [B, ...]."""
    leaves = [
        leaf if isinstance(leaf, Tensor) else torch.from_numpy(np.array(leaf))
        for leaf in tree_leaves(result)
    ]
    if not leaves:
        raise ValueError("a run returned nothing: make it return what the pipeline returns")
    return torch.stack(leaves).float() if len(leaves) > 1 else leaves[0].float()


def decibel(found: Tensor, truth: Tensor) -> Tensor:
    """PSNR of each item, [B], with the truth's own range as the peak."""
    peak = (truth.max() - truth.min()).clamp(min=1e-12)
    error = (found - truth).flatten(1).square().mean(1).clamp(min=1e-24)
    return 10 * torch.log10(peak**2 / error)


def _check_repeats(pipe: Any, run: Run, before: dict[str, Trace]) -> None:
    """Raises ValueError if another full run begins with other outputs."""
    again, _ = _traced(pipe, run)
    for name, trace in before.items():
        if name not in again or not torch.equal(trace.guided()[0], again[name].guided()[0]):
            raise ValueError(
                "the run does not repeat itself: make its generator inside, "
                "lambda: pipe(..., generator=torch.Generator().manual_seed(0))"
            )


def _wrapped(pipe: Any) -> list[Denoiser]:
    found = map(_state, _denoisers(pipe).values())
    return [denoiser for denoiser in found if denoiser is not None]


def _traced(pipe: Any, run: Run) -> tuple[dict[str, Trace], Any]:
    """Makes one full run; the outputs of each denoiser, and what the run returned."""
    traces: dict[str, Trace] = {}
    api.wrap(pipe, "exact")
    for denoiser in _wrapped(pipe):
        denoiser.observer = partial(_observe, traces, denoiser, pipe)
    try:
        return traces, run()
    finally:
        for denoiser in _wrapped(pipe):
            denoiser.observer = None


def _observe(
    traces: dict[str, Trace], denoiser: Denoiser, pipe: Any, context: CallContext, output: Any
) -> None:
    from .pipelines.denoisers import guidance_scale

    schedule = denoiser.clock.trajectory.schedule if denoiser.clock.trajectory else None
    if schedule is None or schedule.levels is None or not schedule.sigmas:
        raise ValueError(NEEDS)
    trace = traces.setdefault(denoiser.name, Trace())
    trace.levels, trace.end = schedule.levels, schedule.sigmas[-1]
    first = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
    kept = first.detach().to("cpu", copy=True)
    trace.outputs.setdefault(context.branch, {})[context.place] = kept
    trace.scales[context.place] = guidance_scale(pipe, denoiser.name)


def _runs(traces: Sequence[dict[str, Trace]]) -> dict[str, Runs]:
    if not traces:
        raise ValueError("calibration needs at least one run")
    found = {}
    for name, first in traces[0].items():
        outputs = [trace[name].guided() for trace in traces if name in trace]
        if any(len({output.shape for output in run}) > 1 for run in outputs):
            raise ValueError(
                "the passes of a step change in mid-run, in a pipeline that does not name them: "
                "calibrate with guidance that stays on"
            )
        if any(trace[name].sigmas != first.sigmas for trace in traces if name in trace):
            raise ValueError("the runs have different schedules: give all the same steps and shift")
        clips = [[output[item] for output in run] for run in outputs for item in range(len(run[0]))]
        found[name] = Runs.of(first.sigmas, clips)
    if not found:
        raise ValueError(NEEDS)
    return found

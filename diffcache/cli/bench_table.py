"""The bench's rows: one for each method, scheduler and number of steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any

from .. import metrics
from .bench_methods import FEWER, REFERENCE

Row = dict[str, Any]
Methods = dict[str, list[dict[str, Any]]]
Point = tuple[float, float]  # speed-up, dB
SPEEDS = {"speedup": "seconds", "speedup_cpu": "seconds_cpu", "speedup_total": "seconds_total"}
LEVELS = ("psnr_mean", "psnr_p5")


def rows(lines: Sequence[dict[str, Any]], clock: str) -> list[Row]:
    """One row for each method that was measured under each condition (scheduler, steps).

    Args:
        lines: of `Results`.
        clock: the speed-up by which a method is held against fewer steps.
    """
    conditions: dict[tuple[str, int], Methods] = {}
    for line in lines:
        if line["method"] != REFERENCE and "failed" not in line:
            methods = conditions.setdefault((line["scheduler"], line["steps"]), {})
            methods.setdefault(line["method"], []).append(line)
    return [figures for methods in conditions.values() for figures in _against(methods, clock)]


def _against(methods: Methods, clock: str) -> Iterator[Row]:
    """The rows of one condition, each held against fewer steps on the very clips it made."""
    lines: dict[frozenset[Any], dict[str, list[Point]]] = {}
    for clips in methods.values():
        figures, made = row(clips), frozenset(map(_clip, clips))
        if made not in lines:
            same = [[c for c in other if _clip(c) in made] for other in methods.values()]
            fewer = [row(own) for own in same if own and own[0]["family"] == FEWER]
            lines[made] = {level: curve(fewer, FEWER, level, clock) for level in LEVELS}
        for level, points in lines[made].items():
            other = at_speed(points, figures[clock])
            figures[f"{level}_vs_fewer"] = None if other is None else figures[level] - other
        yield figures


def _clip(line: dict[str, Any]) -> tuple[str, int]:
    return line["prompt"], line["seed"]


def row(clips: Sequence[dict[str, Any]]) -> Row:
    """One method over its clips: medians of ratios to the reference of the same clip."""
    first = clips[0]
    psnr = [float(clip["psnr"]) for clip in clips]  # "inf": an equal clip
    worst, lowest = metrics.worst(psnr)
    names = ("scheduler", "steps", "method", "family", "setting", "kind", "block_gating")
    changed = [clip["changed"] for clip in clips if "changed" in clip]
    return {
        **{name: first[name] for name in names},
        "clips": len(clips),
        "computed": mean(c["work"] / c["reference_work"] for c in clips) * first["steps"],
        **{
            name: median(clip[f"reference_{timed}"] / clip[timed] for clip in clips)
            for name, timed in SPEEDS.items()
        },
        "psnr_mean": mean(psnr),
        "psnr_p5": worst,
        "psnr_min": lowest,
        "ssim_mean": mean(float(clip["ssim"]) for clip in clips),
        "attributes_changed": sum(changed) if changed else None,
    }


def curve(found: Iterable[Row], family: str, level: str, clock: str) -> list[Point]:
    """(speed-up, dB) of a family, from slow to fast."""
    return sorted((r[clock], r[level]) for r in found if r["family"] == family)


def at_speed(points: Sequence[Point], speedup: float) -> float | None:
    """The quality of a curve at a speed-up, linear between its points; None outside of them."""
    for (left, high), (right, low) in pairwise(points):
        if left <= speedup <= right and right > left:
            return high + (speedup - left) / (right - left) * (low - high)
    return None

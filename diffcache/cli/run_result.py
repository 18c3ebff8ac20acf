"""The figures of `diffcache run`: one entry for each clip, and all of them together."""

import platform
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from .. import __version__, metrics
from ..policy import Policy
from ..records import Report
from .run_call import Call
from .run_clip import Made
from .run_files import Job


def entry(
    job: Job, call: Call, made: Made, uncached: Made | None, report: Report
) -> dict[str, Any]:
    """One clip: what was made, what it cost, and how far it is from the uncached one."""
    counts = report.summary["computed"], report.summary["reused"]
    computed, reused = (mean(found.values()) if found else 0 for found in counts)
    frames, height, width = made.frames.shape[:3]
    figures = {
        "prompt": job.prompt,
        "seed": job.seed,
        "path": str(job.path),
        "frames": frames,
        "height": height,
        "width": width,
        "steps": report.summary["steps"],
        "computed": computed,
        "reused": reused,
        "ideal_speedup": report.summary["ideal_speedup"],
        "bytes_peak": report.summary["bytes_peak"],
        "seconds": made.seconds,
        "seconds_total": made.seconds_total,
        "notes": [*_surprises(call, made), *report.summary["notes"]],
    }
    return figures if uncached is None else {**figures, **_compared(job, made, uncached)}


def together(
    entries: Sequence[dict[str, Any]], source: str, pipe: Any, policy: Policy, call: Call
) -> dict[str, Any]:
    """Everything that --json prints; "comparison" is null without --compare."""
    arguments = {name: value for name, value in call.arguments.items() if name != "output_type"}
    return {
        "source": source,
        "pipeline": type(pipe).__name__,
        "scheduler": type(getattr(pipe, "scheduler", None)).__name__,
        "policy": policy.name,
        "composition": policy.describe(),
        "arguments": arguments,
        "fps": call.fps if call.video else None,
        "clips": list(entries),
        "comparison": _comparison(entries) if entries and "psnr" in entries[0] else None,
        "environment": environment(pipe),
    }


def environment(pipe: Any) -> dict[str, Any]:
    """Where and on what the figures were measured."""
    from importlib.metadata import version

    return {
        "diffcache": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": version("diffusers"),
        "device": str(getattr(pipe, "device", "unknown")),
        "dtype": str(getattr(pipe, "dtype", "unknown")).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def _compared(job: Job, made: Made, uncached: Made) -> dict[str, Any]:
    if made.frames.shape != uncached.frames.shape:
        raise ValueError(
            f"the cached clip is {made.frames.shape}, the uncached one {uncached.frames.shape}: "
            "the pipeline does not repeat itself, so leave --compare out"
        )
    large = min(made.frames.shape[1:3]) >= metrics.SSIM_WINDOW
    return {
        "path_uncached": str(job.reference),
        "seconds_uncached": uncached.seconds,
        "seconds_total_uncached": uncached.seconds_total,
        "speedup": _ratio(uncached.seconds, made.seconds),
        "speedup_total": _ratio(uncached.seconds_total, made.seconds_total),
        "identical": bool(np.array_equal(made.frames, uncached.frames)),
        "psnr": metrics.psnr(made.frames, uncached.frames),
        "ssim": metrics.ssim(made.frames, uncached.frames) if large else float("nan"),
    }


def _comparison(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Speed-ups are ratios of medians over the clips; "p5" is the worst 5 % over clips."""
    psnr, ssim = ([clip[name] for clip in entries] for name in ("psnr", "ssim"))
    found: dict[str, Any] = {"clips": len(entries)}
    for name in ("seconds", "seconds_total"):
        uncached, cached = (
            median(clip[key] for clip in entries) for key in (f"{name}_uncached", name)
        )
        found[name.replace("seconds", "speedup")] = _ratio(uncached, cached)
    found["identical"] = sum(clip["identical"] for clip in entries)
    for name, values in (("psnr", psnr), ("ssim", ssim)):
        worst, lowest = metrics.worst(values)
        found |= {f"{name}_mean": mean(values), f"{name}_p5": worst, f"{name}_min": lowest}
    return found


def _surprises(call: Call, made: Made) -> list[str]:
    """What came out otherwise than asked for."""
    names = {"num_frames": "frames", "video_length": "frames", "height": "height", "width": "width"}
    sizes = dict(zip(("frames", "height", "width"), made.frames.shape, strict=False))
    notes = [
        f"asked for {names[name]} {asked}, the pipeline made {sizes[names[name]]}"
        for name, asked in call.arguments.items()
        if name in names and sizes[names[name]] != asked
    ]
    if not np.isfinite(made.frames).all():
        notes.append("the clip holds NaN or infinity, written as black: try --dtype float32")
    return notes


def _ratio(uncached: float, cached: float) -> float:
    return uncached / cached if cached else float("nan")

"""What the demo writes to report.json: one row for each method, compared with the reference."""

import platform
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

import torch

from .. import __version__, metrics
from .demo_run import METHODS, REFERENCE, Clip, Method, Task


def summarise(clips: dict[str, list[Clip]], task: Task) -> dict[str, Any]:
    """The report: "reference", "rows" and "environment"; seconds are medians over the clips."""
    reference = clips[REFERENCE.name]
    return {
        "reference": {
            "seconds": median(clip.seconds for clip in reference),
            "seconds_cpu": median(clip.seconds_cpu for clip in reference),
            "seconds_total": median(clip.seconds_total for clip in reference),
            "steps": task.steps,
            "computed": _mean([clip.computed for clip in reference]),
        },
        "rows": [_row(method, clips[method.name], reference) for method in METHODS],
        "environment": environment(task, clips),
    }


def _row(method: Method, clips: Sequence[Clip], reference: Sequence[Clip]) -> dict[str, Any]:
    psnr = [metrics.psnr(a.frames, b.frames) for a, b in zip(clips, reference, strict=True)]
    ssim = [metrics.ssim(a.frames, b.frames) for a, b in zip(clips, reference, strict=True)]
    worst, lowest = metrics.worst(psnr)
    seconds = median(clip.seconds for clip in clips)
    cpu = median(clip.seconds_cpu for clip in clips)
    total = median(clip.seconds_total for clip in clips)
    ideal = [
        clip.report.summary["ideal_speedup"] if clip.report else other.computed / clip.computed
        for clip, other in zip(clips, reference, strict=True)
    ]
    return {
        "name": method.name,
        "policy": method.policy,
        "settings": dict(method.settings),
        "computed": _mean([clip.computed for clip in clips]),
        "steps": _mean([clip.steps for clip in clips]),
        "seconds": seconds,
        "seconds_cpu": cpu,
        "seconds_total": total,
        "speedup": median(clip.seconds for clip in reference) / seconds,
        "speedup_cpu": median(clip.seconds_cpu for clip in reference) / cpu,
        "speedup_total": median(clip.seconds_total for clip in reference) / total,
        "ideal_speedup": mean(ideal),
        "psnr_mean": mean(psnr),
        "psnr_p5": worst,
        "psnr_min": lowest,
        "ssim_mean": mean(ssim),
        "bytes_peak": max((c.report.summary["bytes_peak"] for c in clips if c.report), default=0),
        "psnr": psnr,
    }


def environment(task: Task, clips: dict[str, list[Clip]]) -> dict[str, Any]:
    """Where and on what the figures were measured."""
    from importlib.metadata import version

    return {
        "diffcache": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": version("diffusers"),
        "transformers": version("transformers"),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "threads": 1,
        "waited": waited(clips),
        "dtype": "float32",
        "clips": len(task.prompts),
        **task.call,
    }


def waited(clips: dict[str, list[Clip]]) -> float:
    """The share of the time in which other work on the machine held this process up."""
    every = [clip for made in clips.values() for clip in made]
    cpu = sum(clip.seconds_cpu for clip in every)
    return max(0.0, round(1 - cpu / sum(clip.seconds for clip in every), 3))


def processor() -> str:
    """The name of this machine's CPU."""
    from pathlib import Path

    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _mean(values: Sequence[float]) -> float | int:
    """The mean, as an int where it is whole."""
    value = mean(values)
    return int(value) if float(value).is_integer() else round(value, 2)

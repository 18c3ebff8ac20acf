"""How the figures of `diffcache run` are said: a line, a table's header, its rows."""

from pathlib import Path
from typing import Any

from .output import size


def lead(figures: dict[str, Any]) -> str:
    """What ran, and with --compare what came of it, in a sentence or two."""
    count = len(figures["clips"])
    text = f"{figures['pipeline']}, policy {figures['policy']}, {count} clip{'s'[: count != 1]}."
    found = figures["comparison"]
    if found is None:
        return text
    text += f" {found['speedup']:.2f} times as fast ({found['speedup_total']:.2f} the whole call)"
    if found["identical"] == count:
        return f"{text}, identical to the uncached pipeline."
    if count == 1:
        return f"{text}; PSNR {found['psnr_mean']:.1f} dB, SSIM {found['ssim_mean']:.4f}."
    return (
        f"{text}; PSNR mean {found['psnr_mean']:.1f} dB, worst 5 % {found['psnr_p5']:.1f}, "
        f"minimum {found['psnr_min']:.1f}; SSIM mean {found['ssim_mean']:.4f}, "
        f"minimum {found['ssim_min']:.4f}."
    )


def header(figures: dict[str, Any]) -> list[str]:
    names = ["file", "computed", "loop s", "total s"]
    more = ["speed-up", "total", "PSNR dB", "SSIM"] if figures["comparison"] else ["size", "memory"]
    return names + more


def cells(figures: dict[str, Any], clip: dict[str, Any]) -> list[str]:
    """One row of the table."""
    row = [Path(clip["path"]).name, f"{clip['computed']:g} of {clip['steps']}"]
    row += [f"{clip['seconds']:.2f}", f"{clip['seconds_total']:.2f}"]
    if figures["comparison"] is None:
        sides = ("height", "width") if figures["fps"] is None else ("frames", "height", "width")
        return [*row, " x ".join(str(clip[side]) for side in sides), size(clip["bytes_peak"])]
    psnr = "identical" if clip["identical"] else f"{clip['psnr']:.1f}"
    speeds = [f"{clip[name]:.2f}x" for name in ("speedup", "speedup_total")]
    return [*row, *speeds, psnr, f"{clip['ssim']:.4f}"]


def notes(figures: dict[str, Any]) -> list[str]:
    """Every note once, with how many clips it is of where it is not of all."""
    counted: dict[str, int] = {}
    for clip in figures["clips"]:
        for note in clip["notes"]:
            counted[note] = counted.get(note, 0) + 1
    every = len(figures["clips"])
    return [
        note if times == every else f"{note} ({times} of {every} clips)"
        for note, times in counted.items()
    ]

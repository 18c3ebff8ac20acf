"""The demo's page: figures, clips side by side, what was computed when, errors over the frames."""

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from .. import metrics
from ..page import page, section, table, timeline_svg
from . import charts, demo_video
from .demo_assets import SCRIPT, STYLE
from .demo_run import METHODS, REFERENCE, Clip, Task
from .output import size


def write_page(
    path: Path, task: Task, clips: dict[str, list[Clip]], figures: dict[str, Any]
) -> None:
    """Writes one HTML file with everything in it."""
    tabs = "".join(f'<button type="button">{escape(p)}</button>' for p in task.prompts)
    views = [_clip(i, clips, figures) for i in range(len(task.prompts))]
    note = (
        "All tiles play from one video, so they stay in step. Below each clip: its error against "
        f"the reference, {demo_video.GAIN} times as bright. Move over the chart to step through "
        "the frames."
    )
    sections = [
        f'<section class="plain"><p class="lead soft">{escape(_lead(figures))}</p></section>',
        section(_figures(figures), "Speed and quality", _timing_note(figures)),
        section(_scatter(figures), "Quality against speed", "Up and right is better."),
        section(f'<div class="tabs">{tabs}</div>{"".join(views)}', "Clips side by side", note),
        section(_environment(figures["environment"]), "Environment"),
    ]
    path.write_text(page("diffcache demo", sections, SCRIPT, STYLE), encoding="utf-8")


def _lead(figures: dict[str, Any]) -> str:
    best, fewer = figures["rows"][0], figures["rows"][1]
    return (
        f"The forecast policy computes {best['computed']:g} of {figures['reference']['steps']} "
        f"steps: {best['speedup']:.2f} times as fast, {best['psnr_mean']:.1f} dB PSNR against the "
        "full computation. "
        f"Running {fewer['steps']:g} solver steps instead costs the same and reaches "
        f"{fewer['psnr_mean']:.1f} dB."
    )


def _timing_note(figures: dict[str, Any]) -> str:
    where = figures["environment"]
    return (
        f"Seconds are medians over {where['clips']} clips on one CPU thread; every clip was made "
        "by all methods in turn. Speed-up is that of the denoising loop, in brackets that of the "
        f"whole call; other work on the machine took {where['waited']:.0%} of the time. PSNR and "
        "SSIM are against the reference clip of the same seed."
    )


def _figures(figures: dict[str, Any]) -> str:
    header = (
        "",
        "computed",
        "seconds",
        "speed-up",
        "CPU time",
        "ideal",
        "PSNR",
        "worst 5 %",
        "minimum",
        "SSIM",
    )
    reference = figures["reference"]
    body: list[Sequence[Any]] = [
        (
            "reference",
            f"{reference['computed']:g} of {reference['steps']}",
            f"{reference['seconds']:.2f}",
            *("1.00x", "1.00x", "1.00x", "", "", "", "", ""),
        )
    ]
    for row in figures["rows"]:
        body.append(
            (
                row["name"],
                f"{row['computed']:g} of {row['steps']:g}",
                f"{row['seconds']:.2f}",
                f"{row['speedup']:.2f}x ({row['speedup_total']:.2f}x)",
                f"{row['speedup_cpu']:.2f}x",
                f"{row['ideal_speedup']:.2f}x",
                *(f"{row[name]:.1f}" for name in ("psnr_mean", "psnr_p5", "psnr_min")),
                f"{row['ssim_mean']:.4f}",
                size(row["bytes_peak"]) if row["bytes_peak"] else "",
            )
        )
    return table((*header, "memory"), body)


def _scatter(figures: dict[str, Any]) -> str:
    points = {r["name"]: (r["speedup"], r["psnr_mean"], r["psnr_min"]) for r in figures["rows"]}
    return charts.scatter(points, "speed-up of the denoising loop", "dB")


def _clip(index: int, clips: dict[str, list[Clip]], figures: dict[str, Any]) -> str:
    """Everything about one prompt."""
    made = {name: versions[index] for name, versions in clips.items()}
    reference = made[REFERENCE.name]
    frames = demo_video.mosaic([clip.frames for clip in made.values()])
    source = demo_video.as_mp4(frames)
    video = (
        f'<video muted loop playsinline preload="auto" src="{source}"></video>' if source else ""
    )
    hint = "" if source else '<p class="soft">For moving clips: pip install imageio-ffmpeg</p>'
    count = len(frames)
    tiles = "".join(_tile(name, clip, index, figures) for name, clip in made.items())
    errors = {
        method.name: metrics.psnr_per_frame(made[method.name].frames, reference.frames).tolist()
        for method in METHODS
    }
    return (
        f'<div class="clip" data-columns="{len(made)}" data-frames="{count}" '
        f'data-fps="{demo_video.FPS}"{" hidden" if index else ""}>{video}'
        f'<img hidden alt="" src="{demo_video.as_png(frames[count // 2])}">{hint}'
        f'<div class="tiles">{tiles}</div>'
        '<div class="controls"><button type="button">Pause</button>'
        f'<input type="range" min="0" max="{count - 1}" value="0" aria-label="Frame">'
        '<output class="soft">frame 0</output></div>'
        "<h3>Computed and reused steps</h3>"
        f"{timeline_svg(_lanes(made))}<h3>PSNR of each frame against the reference</h3>"
        f"{charts.line_chart(errors, 'dB', 'frame')}</div>"
    )


def _tile(name: str, clip: Clip, index: int, figures: dict[str, Any]) -> str:
    known = {row["name"]: row["psnr"][index] for row in figures["rows"]}
    quality = f", {known[name]:.1f} dB" if name in known else ""
    return (
        "<figure><canvas></canvas><canvas></canvas>"
        f"<figcaption><b>{escape(name)}</b><small>{clip.computed:g} of {clip.steps} computed"
        f"{quality}</small></figcaption></figure>"
    )


def _lanes(made: dict[str, Clip]) -> list[Any]:
    """The decisions of the first branch, one lane for each method that caches."""
    rows: list[Any] = []
    for name, clip in made.items():
        if clip.report is not None and clip.report.rows:
            branch = clip.report.rows[0].branch
            rows += [
                replace(row, module=name, branch="")
                for row in clip.report.rows
                if row.branch == branch
            ]
    return rows


def _environment(values: dict[str, Any]) -> str:
    return (
        "<dl>"
        + "".join(
            f"<div><dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd></div>"
            for name, value in values.items()
        )
        + "</dl>"
    )

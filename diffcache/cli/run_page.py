"""The page of `diffcache run --report`: figures, clips, what was computed when."""

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import from_numpy

from .. import metrics
from ..page import page, section, table, timeline_svg
from ..records import Report
from . import charts
from .demo_video import GAIN, as_mp4, as_png
from .run_clip import Array, Made, as_bytes
from .run_files import Job
from .run_text import cells, header, lead

WIDEST = 512  # pixels of a clip in the page; the files keep their size
STYLE = """
video, img { display: block; max-width: 100%; image-rendering: auto; border-radius: 8px; }
video, .clip img { width: min(100%, calc(var(--tiles) * 320px)); }
.labels { display: grid; grid-template-columns: repeat(var(--tiles), 1fr);
  width: min(100%, calc(var(--tiles) * 320px)); margin: 0 0 6px; }
td + td { white-space: nowrap; }
h3 { font-size: 15px; margin: 22px 0 6px; }
"""


def run_page(figures: dict[str, Any], clips: Sequence[str]) -> str:
    """The whole document; `clips` are sections made by `clip_section`."""
    rows = [cells(figures, clip) for clip in figures["clips"]]
    note = (
        "Speed-up is that of the denoising loop, total that of the whole call, against the "
        "uncached pipeline in the same run. PSNR and SSIM are against the uncached clip."
    )
    values = {"source": figures["source"], "policy": figures["composition"]}
    values |= {"scheduler": figures["scheduler"], **figures["arguments"], **figures["environment"]}
    where = "".join(
        f"<div><dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in values.items()
    )
    parts = [
        f'<section class="plain"><p class="soft">{escape(lead(figures))}</p></section>',
        section(table(header(figures), rows), "Clips", note if figures["comparison"] else ""),
        *clips,
        section(f"<dl>{where}</dl>", "Settings and environment"),
    ]
    return page("diffcache run", parts, style=STYLE)


def clip_section(job: Job, made: Made, uncached: Made | None, report: Report, fps: float) -> str:
    """One card: the clip (beside it the uncached one and the error), its timeline, its report."""
    tiles = [("cached", made.frames)]
    if uncached is not None:
        error = np.abs(_unit(made.frames) - _unit(uncached.frames)) * GAIN
        tiles = [("uncached", uncached.frames), *tiles, (f"error x {GAIN}", error)]
    row = as_bytes_in_row([frames for _, frames in tiles])
    labels = "".join(f"<small>{escape(name)}</small>" for name, _ in tiles)
    shown = as_mp4(row, fps) if len(row) > 1 else None
    view = (
        f'<video muted loop autoplay controls playsinline src="{shown}"></video>'
        if shown
        else f'<img alt="{escape(job.prompt, quote=True)}" src="{as_png(row[len(row) // 2])}">'
    )
    body = f'<div class="clip" style="--tiles: {len(tiles)}"><div class="labels">{labels}</div>'
    body += f"{view}</div><h3>Computed and reused steps</h3>{timeline_svg(report.rows)}"
    if uncached is not None and len(row) > 1:
        errors = metrics.psnr_per_frame(made.frames, uncached.frames).tolist()
        body += "<h3>PSNR of each frame against the uncached clip</h3>"
        body += charts.line_chart({"cached": errors}, "dB", "frame")
    body += f"<pre>{escape(str(report))}</pre>"
    return section(body, job.prompt, f"seed {job.seed}, {job.path.name}")


def as_bytes_in_row(clips: Sequence[Array]) -> Array:
    """uint8 [F, h, n*w, 3]: clips side by side, no wider than WIDEST each."""
    return np.concatenate([as_bytes(_shrunk(frames)) for frames in clips], axis=2)


def _unit(frames: Array) -> Array:
    return frames.astype(np.float32) / 255 if frames.dtype == np.uint8 else frames


def _shrunk(frames: Array) -> Array:
    height, width = frames.shape[1:3]
    if width <= WIDEST:
        return _unit(frames)
    size = max(1, round(height * WIDEST / width)), WIDEST
    smaller = F.interpolate(from_numpy(_unit(frames)).movedim(-1, 1), size, mode="area")
    return smaller.movedim(1, -1).numpy()

"""The bench's plot: quality against speed-up, a line for each family of methods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .bench_methods import FEWER, HOLD
from .bench_table import Point, Row, curve
from .bench_verdict import front

# Okabe and Ito's colours, which people tell apart whatever their colour vision; after six methods
# they come round again with other markers and dots instead of dashes.
COLOURS = ("#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
MARKERS = "sD^vP*X<>hp"
OURS = {"color": "#0072B2", "marker": "o", "linewidth": 2.4, "markersize": 7, "linestyle": "-"}
BASELINES = {
    FEWER: {"color": "black", "marker": "x", "linewidth": 1.8, "linestyle": "-"},
    HOLD: {"color": "0.55", "marker": "+", "linewidth": 1.8, "linestyle": "-"},
}
TOP = 70.0  # dB; beyond it clips are equal for every purpose
TICKS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20)


def require_matplotlib() -> None:
    """Raises ImportError, with the remedy, where it is missing."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ImportError("the plots need matplotlib: pip install 'diffcache[bench]'")


def plot(path: Path, found: Sequence[Row], clock: str, clips: int) -> None:
    """Writes a PNG of one condition; points are settings, lines join each family's best."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # Presets are points of our own line, so they are drawn by name instead of a family each.
    names = sorted({_family(row) for row in found}, key=_place)
    for name, style in _styles(names).items():
        own = [{**row, "family": _family(row)} for row in found if _family(row) == name]
        _draw(axes, own, name, style, clock)
    _name_presets(axes, found, clock)
    _dress(axes, found, clock, clips)
    figure.savefig(path, dpi=130)


def _family(row: Row) -> str:
    return "diffcache" if row["kind"] == "ours" else str(row["family"])


def _place(name: str) -> tuple[bool, bool, str]:
    """Ours first in the legend, then the baselines, then the others by name."""
    return name != "diffcache", name not in BASELINES, name


def _styles(names: Sequence[str]) -> dict[str, Any]:
    """Ours thick and blue, baselines in black and grey, the rest thin, in colours of their own."""
    styles: dict[str, Any] = {}
    others = 0
    for name in names:
        if name == "diffcache":
            styles[name] = OURS
        elif name in BASELINES:
            styles[name] = BASELINES[name]
        else:
            again = others // len(COLOURS)
            styles[name] = {
                "color": COLOURS[others % len(COLOURS)],
                "marker": MARKERS[others % len(MARKERS)],
                "linestyle": (0, (5, 2)) if not again else (0, (1, 1.5)),
                "linewidth": 1.2,
                "markersize": 5,
            }
            others += 1
    return styles


def _draw(axes: Any, own: Sequence[Row], name: str, style: dict[str, Any], clock: str) -> None:
    mean = _shown(curve(own, name, "psnr_mean", clock))
    best = front(mean)
    line = {**style, "marker": ""}
    axes.plot([x for x, _ in best], [y for _, y in best], **line)
    dots = {**style, "linestyle": "", "linewidth": None}
    axes.plot([x for x, _ in mean], [y for _, y in mean], **dots)
    axes.plot([], [], label=name, **style)
    for row in own:
        low, high = (min(row[level], TOP) for level in ("psnr_p5", "psnr_mean"))
        axes.plot([row[clock]] * 2, [low, high], color=style["color"], linewidth=0.7, alpha=0.5)
        axes.plot([row[clock]], [low], color=style["color"], marker="_", markersize=5, alpha=0.7)


def _shown(points: Sequence[Point]) -> list[Point]:
    return [(x, min(y, TOP)) for x, y in points]


def _name_presets(axes: Any, found: Sequence[Row], clock: str) -> None:
    for row in found:
        if row["kind"] == "ours" and not row["setting"]:
            where = (row[clock], min(row["psnr_mean"], TOP))
            axes.annotate(
                row["method"],
                where,
                textcoords="offset points",
                xytext=(8, 6),
                fontsize=10,
                fontweight="bold",
                color=OURS["color"],
            )


def _dress(axes: Any, found: Sequence[Row], clock: str, clips: int) -> None:
    from matplotlib.ticker import FormatStrFormatter, NullFormatter

    speeds = [row[clock] for row in found]
    axes.set_xscale("log")
    axes.set_xticks([tick for tick in TICKS if tick <= max(speeds) * 1.1])
    axes.xaxis.set_major_formatter(FormatStrFormatter("%gx"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(min(0.97, *speeds) * 0.98, max(speeds) * 1.08)
    low = min(row["psnr_p5"] for row in found)
    axes.set_ylim(max(low - 2, 5), min(max(row["psnr_mean"] for row in found) + 4, TOP + 2))
    how = "CPU time" if clock == "speedup_cpu" else "time"
    axes.set_xlabel(f"speed-up of the denoising loop (median ratio of {how})")
    axes.set_ylabel("PSNR against the uncached clip, dB")
    where = f"{found[0]['scheduler'] or 'own scheduler'}, {found[0]['steps']} steps"
    over = f"{clips} clip{'s' if clips > 1 else ''}"
    axes.set_title(f"{where}, {over}: mean, and 5th percentile below (thin stroke)", loc="left")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=9, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)

"""`diffcache demo`: the packaged model with and without caching, on this machine, offline."""

from pathlib import Path
from typing import Annotated, Any

import typer

from . import demo_model_path
from .output import JsonFlag, progress, show, size, table, to_json

BUSY = 0.1  # share of the time waited above which wall-clock figures are not to be trusted


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the page and report.json.")] = Path(
        "out/demo"
    ),
    steps: Annotated[int | None, typer.Option(min=2, help="Solver steps; default 50.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="How many clips, a prompt each.")] = 3,
    as_json: JsonFlag = False,
) -> None:
    """Makes clips with every method and compares speed and quality with the full computation.

    Runs offline on the CPU with one thread, in about a minute. Prints a table; writes a page with
    the videos side by side (index.html) and the figures (report.json).
    """
    import os

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = demo_model_path()
    from .demo_page import write_page
    from .demo_report import summarise
    from .demo_run import METHODS, Task, run_all
    from .loading import load_pipeline

    task = Task.read(folder, prompts, steps)
    with progress() as bar:
        work = bar.add_task("loading", total=len(task.prompts) * (len(METHODS) + 1))
        pipe = load_pipeline(folder, device="cpu")
        clips = run_all(
            pipe, task, lambda name: bar.update(work, advance=1, description=f"after {name}")
        )
        bar.update(work, description="writing the page")
        figures = summarise(clips, task)
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.json").write_text(to_json(figures) + "\n", encoding="utf-8")
        write_page(out / "index.html", task, clips, figures)
    if as_json:
        print(to_json(figures))
        return
    show(_table(figures))
    if figures["environment"]["waited"] > BUSY:
        show(
            f"[yellow]The machine was busy[/]: {figures['environment']['waited']:.0%} of the time "
            "went to other work, so go by the speed-up in CPU time."
        )
    show(f"Videos and timelines: {out / 'index.html'}")
    show(f"Figures: {out / 'report.json'}")


def _table(figures: dict[str, Any]) -> Any:
    reference, rows = figures["reference"], figures["rows"]
    where = figures["environment"]
    title = (
        f"{where['clips']} clips, {reference['steps']} solver steps, one CPU thread. Speed-up of "
        "the denoising loop (CPU: in CPU time, total: of the whole call) against the reference of "
        "the same run. p5: 5th percentile over clips"
    )
    header = ["", "computed", "speed-up", "CPU", "ideal", "total", "PSNR dB", "p5", "min"]
    header += ["SSIM", "memory"]
    first = ["reference", f"{reference['computed']:g}/{reference['steps']}", "1.00x"]
    lines = [[*first, "1.00x", "1.00x", "1.00x", "", "", "", "", ""]]
    lines += [_cells(row) for row in rows]
    return table(title, header, lines)


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        f"{row['computed']:g}/{row['steps']:g}",
        f"{row['speedup']:.2f}x",
        f"{row['speedup_cpu']:.2f}x",
        f"{row['ideal_speedup']:.2f}x",
        f"{row['speedup_total']:.2f}x",
        *(f"{row[name]:.1f}" for name in ("psnr_mean", "psnr_p5", "psnr_min")),
        f"{row['ssim_mean']:.4f}",
        size(row["bytes_peak"]) if row["bytes_peak"] else "",
    ]

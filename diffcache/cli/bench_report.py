"""What the bench writes and says: table, CSV, JSON, plots, verdicts."""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .bench_plot import plot
from .bench_run import Plan
from .bench_store import Results
from .bench_table import Row, rows
from .bench_verdict import front, verdicts
from .demo_report import processor
from .media import publish
from .output import to_json
from .run_result import environment

BUSY = 0.1  # share of the time waited above which CPU time is the clock
HEADER = ["method", "computed", "speed", "CPU", "PSNR", "p5", "min", "SSIM", "vs fewer", "p5 vs"]
ORDER = ("ours", "published", "baseline", "peer")
Line = dict[str, Any]


def report(results: Results, plan: Plan, pipe: Any, missing: dict[str, str]) -> dict[str, Any]:
    """Writes bench.csv, bench.json and the plots; returns what bench.json holds."""
    lines = [line for line in results.lines if "failed" not in line]
    waited = waiting(lines)
    clock = "speedup_cpu" if waited > BUSY and pipe.device.type == "cpu" else "speedup"
    found = rows(lines, clock)
    found.sort(key=lambda r: (ORDER.index(r["kind"]), r["family"], r[clock]))
    common = rows(shared(lines, plan), clock) if plan.peers else found
    count = plan.peer_clips if plan.peers else len(plan.clips)
    conditions = [(scheduler, steps) for scheduler, steps in plan.conditions]
    figures = {
        "settings": results.settings,
        "rows": found,
        "verdicts": [{**verdict, "clips": count} for verdict in verdicts(common, clock)],
        "missing": missing,
        "clock": clock,
        "waited": waited,
        "environment": {
            **environment(pipe),
            "threads": 1,
            "processor": processor(),
            "date": time.strftime("%Y-%m-%d"),
        },
    }
    text = to_json(figures) + "\n"
    _write(results, "bench.json", lambda path: path.write_text(text, encoding="utf-8"))
    _write(results, "bench.csv", lambda path: write_csv(path, found))
    for scheduler, steps in conditions:
        name = f"pareto-{scheduler or 'own'}-{steps}.png".replace("@", "-shift")
        drawn = of(common, scheduler, steps)
        _write(results, name, partial(plot, found=drawn, clock=clock, clips=count))
    return figures


def _write(results: Results, name: str, write: Callable[[Path], Any]) -> None:
    """A whole file or the one that was there; a disk that is full says so."""
    publish(results.folder / name, write, force=True)


def of(found: Sequence[Row], scheduler: str, steps: int) -> list[Row]:
    """The rows of one condition."""
    return [r for r in found if (r["scheduler"], r["steps"]) == (scheduler, steps)]


def shown(found: Sequence[Row], clock: str) -> list[Row]:
    """For the table: of a peer only the settings that no other of its family beats in both."""
    best = {
        family: front([(r[clock], r["psnr_mean"]) for r in found if r["family"] == family])
        for family in {r["family"] for r in found}
    }
    return [
        r for r in found if r["kind"] != "peer" or (r[clock], r["psnr_mean"]) in best[r["family"]]
    ]


def write_csv(path: Path, found: Sequence[Row]) -> None:
    """One row for each method, scheduler and number of steps; numbers rounded to what they mean."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]), restval="", lineterminator="\n")
        writer.writeheader()
        for row in found:
            writer.writerow({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()})


def cells(row: Row) -> list[str]:
    """One line of the table."""
    changed = row["attributes_changed"]
    return [
        row["method"],
        f"{row['computed']:.1f}",
        *(f"{row[name]:.2f}x" for name in ("speedup", "speedup_cpu")),
        *(f"{row[name]:.1f}" for name in ("psnr_mean", "psnr_p5", "psnr_min")),
        f"{row['ssim_mean']:.3f}",
        *(_signed(row[f"{name}_vs_fewer"]) for name in ("psnr_mean", "psnr_p5")),
        *([] if changed is None else [f"{changed}/{row['clips']}"]),
    ]


def shared(lines: Sequence[Line], plan: Plan) -> list[Line]:
    """The lines of the clips that peers made too."""
    theirs = set(plan.clips[: plan.peer_clips])
    return [line for line in lines if (line["prompt"], line["seed"]) in theirs]


def waiting(lines: Sequence[Line]) -> float:
    """The share of the time in which other work on the machine held this process up."""
    wall = sum(line["seconds"] for line in lines)
    return max(0.0, round(1 - sum(line["seconds_cpu"] for line in lines) / wall, 3))


def _signed(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:+.1f}"

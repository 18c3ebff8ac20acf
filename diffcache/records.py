"""Records of decisions, and the report made of them: table, JSON, HTML."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

MAX_ROWS = 200_000


@dataclass(slots=True)
class Row:
    """One decision; `seconds` is the host time of the whole call, on its first row alone."""

    module: str
    site: str
    branch: str
    chunk: int | None
    step: int
    timestep: float
    sigma: float | None
    decision: str  # "compute" or "reuse"
    reason: str
    metric: float | None = None
    error: float | None = None
    saved: float = 0.0  # share of the forward's blocks that did not run
    seconds: float = 0.0


@dataclass
class Recorder:
    """The rows of the last run of one denoiser; a run may span several trajectories (chunks)."""

    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    token: Any = None
    dropped: int = 0
    begun: float = 0.0  # host clock at the first call of the run
    ended: float = 0.0  # and after the last one

    def begin(self, token: Any) -> None:
        self.rows, self.notes, self.token, self.dropped = [], [], token, 0
        self.begun = self.ended = monotonic()

    def add(self, row: Row) -> None:
        if len(self.rows) < MAX_ROWS:
            self.rows.append(row)
        else:
            self.dropped += 1

    def end_call(self, row: Row, seconds: float) -> None:
        """A call is over: `row` is its first."""
        row.seconds = seconds
        self.ended = monotonic()

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


class Report:
    """What the last run computed, reused and saved, and why.

    Attributes:
        rows: one `Row` for each decision, in order.
        summary: counts per branch, ideal speed-up, bytes, notes, and host seconds: those in the
            denoisers' calls, those of the loop (first call to the end of the last), and the share.
    """

    def __init__(
        self, policy: str, modules: dict[str, dict[str, Any]], recorders: dict[str, Recorder]
    ) -> None:
        self.rows = [row for recorder in recorders.values() for row in recorder.rows]
        self.summary = _summarise(policy, modules, self.rows)
        self.summary |= _shares(self.summary["seconds"], list(recorders.values()))
        self.summary["notes"] = [note for recorder in recorders.values() for note in recorder.notes]
        self.summary["notes"] += _doubts(self.rows, recorders)

    def to_json(self) -> str:
        everything = {"summary": self.summary, "rows": [asdict(row) for row in self.rows]}
        return json.dumps(_finite(everything), indent=1, allow_nan=False)

    def to_html(self, path: str | Path) -> None:
        """Writes one self-contained page: summary, timeline, every decision."""
        from . import page

        sections = [
            f"<pre>{page.escape(str(self))}</pre>",
            page.timeline_svg(self.rows),
            page.decision_table(self.rows),
        ]
        Path(path).write_text(page.page("diffcache report", sections), encoding="utf-8")

    def __str__(self) -> str:
        s = self.summary
        lines = [f"policy {s['policy']}: {s['calls']} calls over {s['steps']} steps"]
        for name, module in s["modules"].items():
            lines.append(f"  {name}: {module['site']}, {module['hooked']} hooked")
        for branch in s["computed"]:
            lines.append(
                f"  {branch}: {s['computed'][branch]} computed, {s['reused'][branch]} reused"
            )
        lines.append(
            f"  ideal speed-up {s['ideal_speedup']:.2f}x, about {s['seconds_saved']:.2f} s saved"
        )
        lines.append(
            f"  denoiser {s['seconds']:.2f} s of {s['loop_seconds']:.2f} s in the loop"
            f" ({s['denoiser_share']:.0%})"
        )
        lines.append(f"  held at most {s['bytes_peak']:,} bytes, now {s['bytes_held']:,}")
        reasons = ", ".join(f"{reason} {count}" for reason, count in s["reasons"].items())
        lines.append(f"  computed because: {reasons or 'nothing was computed'}")
        return "\n".join(lines + [f"  note: {note}" for note in s["notes"]])

    __repr__ = __str__


def _finite(value: Any) -> Any:
    """The same with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


def _summarise(policy: str, modules: dict[str, dict[str, Any]], rows: list[Row]) -> dict[str, Any]:
    calls: dict[tuple[str, str, int | None, int], list[Row]] = {}
    for index, row in enumerate(rows):
        # Rows of blocks belong to the call whose first row carries the seconds.
        if row.seconds or not calls:
            calls[(row.module, row.branch, row.chunk, index)] = []
        calls[next(reversed(calls))].append(row)
    computed: Counter[str] = Counter()
    reused: Counter[str] = Counter()
    saved_forwards = sum(row.saved for row in rows)
    times: dict[str, list[float]] = {"compute": [], "reuse": []}
    for (_, branch, _, _), parts in calls.items():
        kinds = {part.decision for part in parts}
        computed[branch] += kinds == {"compute"}
        reused[branch] += "reuse" in kinds
        times["reuse" if "reuse" in kinds else "compute"].append(parts[0].seconds)
    saved = (
        len(times["reuse"]) * (median(times["compute"]) - median(times["reuse"]))
        if all(times.values())
        else 0.0
    )
    return {
        "policy": policy,
        "modules": modules,
        "steps": len({(row.chunk, row.timestep) for row in rows}),
        "calls": len(calls),
        "computed": {branch: computed[branch] for branch in sorted({row.branch for row in rows})},
        "reused": {branch: reused[branch] for branch in sorted({row.branch for row in rows})},
        "ideal_speedup": _ideal(len(calls), saved_forwards),
        "seconds": sum(row.seconds for row in rows),
        "seconds_saved": max(0.0, saved),
        "reasons": dict(
            Counter(row.reason for row in rows if row.decision == "compute").most_common()
        ),
        "bytes_peak": sum(module["bytes_peak"] for module in modules.values()),
        "bytes_held": sum(module["bytes_held"] for module in modules.values()),
    }


def _shares(seconds: float, recorders: list[Recorder]) -> dict[str, float]:
    """Wall time from the first call of the denoisers to the end of the last, and their share."""
    ran = [recorder for recorder in recorders if recorder.rows]
    loop = max((r.ended for r in ran), default=0.0) - min((r.begun for r in ran), default=0.0)
    loop = max(loop, seconds)
    return {"loop_seconds": loop, "denoiser_share": seconds / loop if loop else 0.0}


def _ideal(calls: int, saved_forwards: float) -> float:
    return calls / (calls - saved_forwards) if calls > saved_forwards else 1.0


def _doubts(rows: list[Row], recorders: dict[str, Recorder]) -> list[str]:
    """What a user would want to be told of this run."""
    notes = [
        f"{recorder.dropped} rows beyond {MAX_ROWS} were left out"
        for recorder in recorders.values()
        if recorder.dropped
    ]
    if not rows:
        return [*notes, "nothing ran yet: call the pipeline, then report"]
    if all(row.decision == "compute" for row in rows):
        return [*notes, f"nothing was skipped; most often because: {_top_reason(rows)}"]
    notes += [
        f"{name}: nothing was skipped; most often because: {_top_reason(recorder.rows)}"
        for name, recorder in recorders.items()
        if recorder.rows and all(row.decision == "compute" for row in recorder.rows)
    ]
    return notes


def _top_reason(rows: list[Row]) -> str:
    return Counter(row.reason for row in rows).most_common(1)[0][0]

"""Rows and the report made of them, by hand."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import diffcache
from diffcache import records
from diffcache.records import Recorder, Report, Row

MODULES = {"transformer": {"site": "model", "hooked": 1, "bytes_peak": 64, "bytes_held": 16}}


def row(step, decision, branch="cond", **fields):
    """One row; a call has `seconds` on its first row."""
    defaults = {"reason": "table", "seconds": 0.1, "saved": float(decision == "reuse")}
    fields = {**defaults, **fields}
    return Row("transformer", "model", branch, None, step, -float(step), None, decision, **fields)


def report(*rows, notes=()):
    recorder = Recorder()
    recorder.begin(None)
    for item in rows:
        recorder.add(item)
    for note in notes:
        recorder.note(note)
    return Report("hold", MODULES, {"transformer": recorder})


def test_summary_by_hand():
    """Four steps of two branches: cond computes 2, uncond 3; ideal 8 / (8 - 3)."""
    decisions = ["compute", "reuse", "reuse", "compute"]
    rows = [row(i, decision) for i, decision in enumerate(decisions)]
    rows += [row(i, "reuse" if i == 1 else "compute", "uncond") for i in range(4)]
    summary = report(*rows).summary
    assert (summary["steps"], summary["calls"]) == (4, 8)
    assert summary["computed"] == {"cond": 2, "uncond": 3}
    assert summary["reused"] == {"cond": 2, "uncond": 1}
    assert summary["ideal_speedup"] == pytest.approx(8 / 5)
    assert summary["seconds"] == pytest.approx(0.8)
    assert (summary["bytes_peak"], summary["bytes_held"]) == (64, 16)
    assert summary["reasons"] == {"table": 5}


def test_seconds_saved_is_the_difference_of_medians():
    """Two reused calls at 1 s against computed ones of 5 s (one slow one does not count)."""
    rows = [row(i, "compute", seconds=s) for i, s in enumerate([5.0, 5.0, 50.0])]
    rows += [row(i, "reuse", seconds=1.0) for i in (3, 4)]
    assert report(*rows).summary["seconds_saved"] == pytest.approx(2 * (5.0 - 1.0))


def test_seconds_saved_is_never_negative():
    """A cache slower than the model saves nothing."""
    rows = [row(0, "compute", seconds=0.1), row(1, "reuse", seconds=0.3)]
    assert report(*rows).summary["seconds_saved"] == 0.0


def test_rows_of_blocks_are_one_call():
    """Ten blocks, four of them reused in the second call: 2 / (2 - 0.4)."""
    rows = [row(0, "compute", seconds=0.2 * (i == 0)) for i in range(10)]
    for i in range(10):
        kind = "reuse" if i >= 6 else "compute"
        rows.append(row(1, kind, seconds=0.1 * (i == 0), saved=0.1 * (i >= 6)))
    summary = report(*rows).summary
    assert summary["calls"] == 2 and summary["seconds"] == pytest.approx(0.3)
    assert (summary["computed"], summary["reused"]) == ({"cond": 1}, {"cond": 1})
    assert summary["ideal_speedup"] == pytest.approx(2 / 1.6)


def test_nothing_ran():
    """The report of an unused denoiser says so and divides by nothing."""
    empty = report()
    assert empty.summary["calls"] == 0 and empty.summary["ideal_speedup"] == 1.0
    assert any("nothing ran yet" in note for note in empty.summary["notes"])
    assert "nothing ran yet" in str(empty)


def test_nothing_skipped_says_why():
    """The most frequent reason is named."""
    rows = [row(i, "compute", reason="warm-up" if i < 2 else "no history") for i in range(5)]
    note = "nothing was skipped; most often because: no history"
    assert note in report(*rows).summary["notes"] and note in str(report(*rows))


def test_notes_are_said_once():
    """The same doubt twice is one note."""
    summary = report(row(0, "reuse"), notes=["a", "b", "a"]).summary
    assert summary["notes"] == ["a", "b"]


def test_json_holds_everything():
    """Summary and rows come back as they were."""
    made = report(row(0, "compute", metric=0.25, error=0.5), row(1, "reuse"))
    found = json.loads(made.to_json())
    assert found["rows"][0]["metric"] == 0.25 and found["rows"][1]["decision"] == "reuse"
    assert found["summary"]["computed"] == {"cond": 1} and len(found["rows"]) == 2


@pytest.mark.parametrize("field", ["metric", "error", "sigma", "timestep"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_is_valid_json(field, value):
    """NaN and Infinity are no JSON: browsers and jq refuse them."""
    item = row(0, "compute")
    setattr(item, field, value)
    json.loads(report(item).to_json(), parse_constant=pytest.fail)


def test_text_names_policy_counts_and_reasons():
    """The table is for reading: everything of the summary that matters stands in it."""
    text = str(report(row(0, "compute", reason="warm-up"), row(1, "reuse"), row(2, "reuse")))
    assert "policy hold: 3 calls over 3 steps" in text
    assert "cond: 1 computed, 2 reused" in text
    assert "ideal speed-up 3.00x" in text and "warm-up 1" in text
    assert repr(report(row(0, "reuse"))) == str(report(row(0, "reuse")))


def test_html_is_one_page(tmp_path):
    """Summary and decisions on a page that escapes what it is given."""
    made = report(row(0, "compute", reason="<script>alert(1)</script>"), row(1, "reuse"))
    made.to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page and "&lt;script&gt;alert" in page
    assert "<script>alert(1)" not in page
    made.to_html(str(tmp_path / "again.html"))


def test_rows_are_bounded(monkeypatch):
    """A server that never resets does not fill its memory; the report says what is missing."""
    monkeypatch.setattr(records, "MAX_ROWS", 3)
    made = report(*(row(i, "reuse") for i in range(5)))
    assert len(made.rows) == 3
    assert any(note.startswith("2 rows beyond 3") for note in made.summary["notes"])


def test_begin_drops_the_last_run():
    """Rows, notes and counters belong to one run."""
    recorder = Recorder()
    recorder.add(row(0, "reuse"))
    recorder.note("old")
    token = object()
    recorder.begin(token)
    assert (recorder.rows, recorder.notes, recorder.dropped) == ([], [], 0)
    assert recorder.token is token


class Blocks(nn.Module):
    """Three blocks with a timestep."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))
        self.requires_grad_(False)

    def forward(self, hidden_states, timestep):
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states


@pytest.mark.parametrize("site", ["model", "stack", "block"])
@pytest.mark.parametrize("cancelled", [1, 2, 10])
def test_every_call_has_its_seconds(site, cancelled):
    """Also the first call of a later run: seconds stand on the first row of each call."""
    module = diffcache.wrap(Blocks(), "hold", site=site)
    for steps in (cancelled, 12):
        for step in range(steps):
            module(torch.ones(1, 2), 1000.0 - 50 * step)
    found = diffcache.report(module)
    per_call = {"model": 1, "stack": 1, "block": 2}[site]
    timed = [bool(item.seconds) for item in found.rows]
    assert timed == ([True] + [False] * (per_call - 1)) * 12
    assert found.summary["calls"] == 12
    assert sum(found.summary["computed"].values()) + sum(found.summary["reused"].values()) == 12

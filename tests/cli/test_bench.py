"""`diffcache bench` from the command line: what is measured, what is written, how it resumes."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext

import pytest

from diffcache.cli import bench_run
from diffcache.pipelines import peers as peers_module
from diffcache.pipelines.peers import Peer

COMMAND = [sys.executable, "-c", "from diffcache.cli import main; main()", "bench"]
ONE = ("--policy", "forecast:fraction=0.5", "--steps", "10", "--limit", "1")


def lines_of(out):
    return [json.loads(line) for line in (out / "clips.jsonl").read_text("utf-8").splitlines()]


def keys_of(lines):
    return [(e["scheduler"], e["steps"], e["prompt"], e["seed"], e["method"]) for e in lines]


@pytest.fixture
def two_peers(monkeypatch):
    """A peer that works (it caches nothing) and one that fails in its first call."""
    calls = []

    @contextmanager
    def fails(pipe):
        calls.append("failed")
        raise RuntimeError("shape of the\nwrong kind")
        yield

    def peers(pipe, steps):
        plain = {"block_gating": True, "prepare": None}
        return [
            Peer(family="idle", setting="a=1", apply=lambda pipe: nullcontext(), **plain),
            Peer(family="broken", setting="", apply=fails, **plain),
        ], {"absent": "not for this model"}

    monkeypatch.setattr(peers_module, "peers", peers)
    return calls


@pytest.fixture(scope="module")
def measured(tiny_demo, tmp_path_factory):
    """Two schedulers, one prompt, two seeds, and what --json printed."""
    out = tmp_path_factory.mktemp("bench")
    policies = ("forecast:fraction=0.6|1.0", "first_block:threshold=0.5")
    arguments = [str(tiny_demo), "--steps", "10", "--seeds", "0,1", "--limit", "1", "--json"]
    arguments += [piece for policy in policies for piece in ("--policy", policy)]
    arguments += ["--scheduler", "unipc,euler@4", "--out", str(out)]
    ran = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return out, json.loads(ran.stdout)


def test_every_method_is_measured_under_every_condition(measured):
    _, figures = measured
    conditions = {(row["scheduler"], row["steps"]) for row in figures["rows"]}
    assert conditions == {("unipc", 10), ("euler@4", 10)}
    methods = [row["method"] for row in figures["rows"] if row["scheduler"] == "unipc"]
    assert {"forecast fraction=0.6", "forecast fraction=1.0", "first_block threshold=0.5"} < {
        *methods
    }
    fewer = {row["computed"] for row in figures["rows"] if row["family"] == "fewer steps"}
    assert fewer >= {2.0, 3.0, 4.0, 5.0, 7.0}
    kinds = {row["family"]: row["kind"] for row in figures["rows"]}
    assert kinds == {
        "forecast": "ours",
        "first_block": "published",
        "fewer steps": "baseline",
        "hold": "baseline",
    }
    assert all(row["clips"] == 2 for row in figures["rows"])


def test_computed_is_what_the_blocks_really_ran(measured):
    """Counted within the blocks; it agrees with our own report where whole forwards are skipped."""
    out, figures = measured
    for line in lines_of(out):
        if line.get("family") in ("forecast", "hold"):
            reported = sum(line["reported"].values()) / len(line["reported"])
            share = line["work"] / line["reference_work"]
            assert share * 10 == pytest.approx(reported, abs=1e-6)
    gated = [row["computed"] for row in figures["rows"] if row["family"] == "first_block"]
    assert all(2.5 <= computed < 10 for computed in gated)  # its first block of four always runs


def test_an_exact_setting_is_identical_and_its_figures_are_valid_json(measured):
    out, figures = measured
    exact = [row for row in figures["rows"] if row["setting"] == "fraction=1.0"]
    assert [(row["computed"], row["psnr_mean"], row["ssim_mean"]) for row in exact] == [
        (10.0, None, 1.0)
    ] * 2
    assert {e["psnr"] for e in lines_of(out) if e["method"] == "forecast fraction=1.0"} == {"inf"}
    text = (out / "clips.jsonl").read_text() + (out / "bench.json").read_text()
    assert "NaN" not in text and "Infinity" not in text


def test_files(measured):
    out, figures = measured
    with (out / "bench.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [row["method"] for row in written] == [row["method"] for row in figures["rows"]]
    assert json.loads((out / "bench.json").read_text("utf-8")) == figures
    for name in ("pareto-unipc-10.png", "pareto-euler-shift4-10.png"):
        assert (out / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert (out / name).stat().st_size > 20_000
    keys = keys_of(lines_of(out))
    assert len(set(keys)) == len(keys) == 2 * (len(figures["rows"]) + 2)  # 2 seeds, 2 references
    where = figures["environment"]
    assert where["threads"] == 1 and where["processor"] and where["torch"]
    assert {verdict["quality"] for verdict in figures["verdicts"]} == {36.0, 40.0}


def test_a_killed_run_goes_on_where_it_stopped(diffcache, tiny_demo, tmp_path):
    arguments = [str(tiny_demo), *ONE[:4], "--seeds", "0-1", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    path, deadline = tmp_path / "clips.jsonl", time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < 6:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    before = path.read_bytes()
    before = before[: before.rindex(b"\n") + 1]
    path.write_bytes(before + b'{"scheduler": "", "ste')  # as a kill in mid-write leaves it
    ran = diffcache("bench", *arguments, "--json")
    assert ran.code == 0, ran.err
    after = path.read_bytes()
    assert after.startswith(before) and 6 <= before.count(b"\n") < after.count(b"\n")
    keys = keys_of(lines_of(tmp_path))
    methods = {row["method"] for row in ran.json()["rows"]} | {"reference"}
    assert len(set(keys)) == len(keys) == 4 * len(methods)
    assert all(row["clips"] == 4 for row in ran.json()["rows"])
    again = diffcache("bench", *arguments, "--json")
    assert path.read_bytes() == after, "a finished bench measures nothing anew"
    assert again.json()["rows"] == ran.json()["rows"]


def test_results_of_other_settings_are_refused_and_kept(diffcache, tiny_demo, tmp_path):
    common = ("bench", tiny_demo, "--out", tmp_path, "--json")
    assert diffcache(*common, *ONE).code == 0
    before = (tmp_path / "clips.jsonl").read_bytes()
    for changed, name in (
        (("--steps", "8"), "conditions"),
        (("--policy", "forecast:fraction=0.7"), "policies"),
        (("--seeds", "3"), "clips"),
        (("--guidance", "1"), "arguments"),
    ):
        ran = diffcache(*common, *ONE, *changed)
        assert ran.code == 2 and ran.err.count("\n") == 1
        assert name in ran.err and "--force" in ran.err and ran.out == ""
        assert (tmp_path / "clips.jsonl").read_bytes() == before
    ran = diffcache(*common, *ONE, "--steps", "8", "--force")
    assert ran.code == 0, ran.err
    assert {line["steps"] for line in lines_of(tmp_path)} == {8}


def test_a_failing_peer_is_listed_with_its_reason(diffcache, tiny_demo, tmp_path, two_peers):
    common = ("bench", tiny_demo, *ONE, "--seeds", "0,1", "--out", tmp_path, "--peers")
    ran = diffcache(*common, "--json")
    assert ran.code == 0, ran.err
    assert ran.json()["missing"] == {
        "absent": "not for this model",
        "broken": "RuntimeError: shape of the wrong kind",
    }
    assert two_peers == ["failed"], "tried once, not for each clip"
    idle = next(row for row in ran.json()["rows"] if row["family"] == "idle")
    assert (idle["computed"], idle["psnr_mean"], idle["clips"]) == (10.0, None, 2)
    shown = diffcache(*common)
    assert "Not measured: broken: RuntimeError: shape of the wrong kind" in shown.out
    assert two_peers == ["failed"], "nor in a resumed run"


def test_peers_on_fewer_clips_are_compared_on_those_clips(
    diffcache, tiny_demo, tmp_path, two_peers
):
    options = ("--seeds", "0-2", "--peers", "--peer-clips", "2", "--out", tmp_path)
    ran = diffcache("bench", tiny_demo, *ONE, *options, "--json")
    assert ran.code == 0, ran.err
    clips = {row["family"]: row["clips"] for row in ran.json()["rows"]}
    assert clips == {"forecast": 3, "fewer steps": 3, "hold": 3, "idle": 2}
    assert {verdict["clips"] for verdict in ran.json()["verdicts"]} == {2}
    made = [line for line in lines_of(tmp_path) if line.get("family") == "idle"]
    assert [line["seed"] for line in made] == [0, 1]
    assert "(peers: the first 2)" in diffcache("bench", tiny_demo, *ONE, *options).out


def test_a_judge_counts_clips_that_show_something_else(diffcache, tiny_demo, tmp_path, monkeypatch):
    (tmp_path / "own_judge.py").write_text(
        "def look(frames, prompt):\n    return {'bright': round(float(frames.mean()), 9)}\n"
    )
    monkeypatch.chdir(tmp_path)
    judge = ("--judge", "own_judge:look")
    policies = ("--policy", "forecast:fraction=1.0", "--policy", "hold:fraction=0.4")
    call = ("bench", tiny_demo, *policies, "--steps", "10", "--limit", "1", *judge)
    ran = diffcache(*call, "--out", "out", "--json")
    assert ran.code == 0, ran.err
    changed = {row["method"]: row["attributes_changed"] for row in ran.json()["rows"]}
    assert changed["forecast fraction=1.0"] == 0
    assert changed["hold fraction=0.4"] == 1
    assert "changed" in diffcache(*call, "--out", "out").out


def test_ctrl_c_says_how_to_go_on(diffcache, tiny_demo, tmp_path, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run.Condition, "make", stop)
    ran = diffcache("bench", tiny_demo, *ONE, "--out", tmp_path)
    assert ran.code == 130 and ran.err.count("\n") == 1
    assert "the same command goes on" in ran.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--steps", "50,one"), "--steps must be like"),
        (("--steps", "1"), "--steps must be like"),
        (("--scheduler", "unipd"), "unipc"),
        (("--scheduler", "unipc@-2"), "a shift is a positive number"),
        (("--policy", "forcast"), "forecast"),
        (("--policy", "forecast:fractoin=0.4"), "fraction"),
        (("--policy", "forecast:fraction"), "--policy forecast: takes name=value"),
        (("--policy", "forecast:fraction=0.3,fraction=0.4"), "fraction is given twice"),
        (("--policy", ""), "unknown policy ''"),
        (("--scheduler", "unipc,"), "--scheduler must be like"),
        (("--scheduler", ""), "--scheduler must be like"),
        (("--policy", "forecast:fraction=0.4|0.4"), "twice"),
        (("--judge", "json:nothing"), "--judge takes module:function"),
        (("--judge", "nowhere"), "--judge takes module:function"),
        (("--device", "offload"), "--device offload"),
        (("--prompts", "missing.txt"), "missing.txt"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_work(
    diffcache, tiny_demo, tmp_path, options, said
):
    ran = diffcache("bench", tiny_demo, *options, "--out", tmp_path / "out")
    assert ran.code == 2 and ran.err.count("\n") == 1 and said in ran.err
    assert not (tmp_path / "out").exists()

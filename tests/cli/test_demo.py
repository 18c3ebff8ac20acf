"""`diffcache demo` on a tiny model: the figures, the files, the page."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from diffcache.cli.demo_run import (
    METHODS,
    REFERENCE,
    Task,
    one_thread,
    run_all,
    run_clip,
)
from diffcache.cli.loading import load_pipeline

ROW = {
    "name",
    "computed",
    "steps",
    "seconds",
    "speedup",
    "speedup_total",
    "ideal_speedup",
    "psnr_mean",
    "psnr_p5",
    "psnr_min",
    "ssim_mean",
    "bytes_peak",
}
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def made(tiny_demo):
    return run_all(load_pipeline(tiny_demo), Task.read(tiny_demo, prompts=2))


@pytest.fixture
def ran(diffcache, tiny_demo, tmp_path, monkeypatch):
    monkeypatch.setattr("diffcache.cli.demo.demo_model_path", lambda: tiny_demo)
    return diffcache("demo", "--out", tmp_path / "demo", "--prompts", "2", "--json")


def test_report_and_page_are_written(ran, tmp_path):
    assert ran.code == 0, ran.err
    figures = ran.json()
    assert figures == json.loads((tmp_path / "demo" / "report.json").read_text())
    assert set(figures["reference"]) >= {"seconds", "seconds_total", "steps", "computed"}
    assert figures["reference"]["computed"] == figures["reference"]["steps"] == 12
    rows = {row["name"]: row for row in figures["rows"]}
    assert list(rows) == [method.name for method in METHODS]
    for row in rows.values():
        assert set(row) >= ROW
        assert row["speedup"] == pytest.approx(figures["reference"]["seconds"] / row["seconds"])
        if row["psnr_mean"] is not None:
            assert row["psnr_min"] <= row["psnr_p5"] <= row["psnr_mean"]
    assert rows["fewer steps"]["steps"] == rows["forecast"]["computed"]
    assert rows["forecast"]["bytes_peak"] > 0 == rows["fewer steps"]["bytes_peak"]
    assert figures["environment"]["threads"] == 1
    assert 0 <= figures["environment"]["waited"] < 1


def test_the_page_asks_for_nothing_from_outside(ran, tmp_path):
    page = (tmp_path / "demo" / "index.html").read_text()
    assert "default-src 'none'" in page
    links = re.findall(r"""(?:src|href)=["']([^"']{0,40})""", page)
    assert links and all(link.startswith("data:") for link in links)
    assert "://" not in re.sub(r"data:[a-z0-9/]+;base64,[A-Za-z0-9+/=]+", "", page)
    assert page.count("<video") == 2
    assert all(method.name in page for method in METHODS)


def test_steps_can_be_given(diffcache, tiny_demo, tmp_path, monkeypatch):
    monkeypatch.setattr("diffcache.cli.demo.demo_model_path", lambda: tiny_demo)
    ran = diffcache("demo", "--out", tmp_path, "--prompts", "1", "--steps", "9")
    assert ran.code == 0
    assert "9/9" in ran.out and "PSNR" in ran.out


def test_what_is_counted_is_what_the_report_says(made):
    for method in METHODS:
        for index, clip in enumerate(made[method.name]):
            assert clip.frames.shape == (5, 32, 32, 3)
            if clip.report is not None:
                counted = clip.report.summary["computed"]
                learning = clip.computed - sum(counted.values()) / len(counted)
                assert 0 <= learning <= (1 if index == 0 else 0)


def test_methods_do_not_touch_each_other(made, tiny_demo):
    task = Task.read(tiny_demo, prompts=2)
    alone = load_pipeline(tiny_demo)
    with one_thread():
        frames = run_clip(alone, task, 1, task.steps).frames
    assert (frames == made[REFERENCE.name][1].frames).all()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_the_page_shows_something_and_logs_no_error(ran, tmp_path):
    log = screenshot(tmp_path / "demo" / "index.html", tmp_path / "page.png", tmp_path / "profile")
    assert "CONSOLE" not in log, log
    from PIL import Image

    image = Image.open(tmp_path / "page.png").convert("RGB")
    assert image.size == (1280, 2200)
    assert len(image.getcolors(maxcolors=1 << 24)) > 500


def screenshot(page: Path, image: Path, profile: Path) -> str:
    """Opens a page in headless Chromium; what Chromium logged."""
    command = [
        str(CHROMIUM),
        *["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"],
        *["--disable-background-networking", "--disable-component-update", "--disable-sync"],
        *["--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=3000"],
        f"--user-data-dir={profile}",
        "--window-size=1280,2200",
        f"--screenshot={image}",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr

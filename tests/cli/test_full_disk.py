"""A disk that fills up under other commands than `run`: one line that says what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from small_disk import UNSHARE, mounts

MAIN = "from diffcache.cli import main; main()"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"]])
def test_output_that_goes_to_a_full_disk(arguments, environment):
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-c", MAIN, *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    assert ran.returncode == 2
    assert ran.stderr == (
        "diffcache: the disk is full: free space, then give the same command again\n"
    )


@pytest.mark.skipif(not mounts(), reason="no user namespaces: the disk cannot be made small")
def test_a_bench_on_a_full_disk_goes_on_once_there_is_room(tiny_demo, tmp_path, environment):
    """A disk of its own that has place for a few clips, then for all; no file is left half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    inside = (
        f'mount -t tmpfs -o size=8k none "{disk}"; "$@"; echo "first $?"; cat {disk}/b/*l | wc -l'
    )
    inside += f'; mount -o remount,size=4m "{disk}"; "$@" >/dev/null; echo "second $?"'
    inside += f'; cat {disk}/b/*l | wc -l; wc -c {disk}/b/*; ls -A {disk}/b | grep -c "^[.]"'
    command = [sys.executable, "-c", MAIN, "bench", str(tiny_demo), "--policy", "forecast"]
    command += ["--steps", "10", "--limit", "1", "--out", str(disk / "b")]
    ran = subprocess.run(
        [str(UNSHARE), "-Urm", "sh", "-c", inside, "sh", *command],
        capture_output=True,
        text=True,
        env=environment,
    )
    said = ran.stdout.splitlines()
    assert said[0] == "first 2" and said[2] == "second 0", (ran.stdout, ran.stderr)
    assert 0 < int(said[1]) < int(said[3])
    assert ran.stderr.startswith("diffcache: the disk is full") and ran.stderr.count("\n") == 1
    assert all(int(line.split()[0]) > 0 for line in said[4:-1]) and said[-1] == "0"

"""`diffcache run` as a real process: a full disk, a small file limit, no permission, Ctrl-C."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_disk import UNSHARE, mounts

COMMAND = [sys.executable, "-c", "from diffcache.cli import main; main()", "run"]


def finished(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def is_whole(path: Path) -> bool:
    from imageio_ffmpeg import count_frames_and_secs

    return count_frames_and_secs(str(path))[0] == 5


@pytest.mark.skipif(not mounts(), reason="no user namespaces: the disk cannot be made small")
@pytest.mark.parametrize("kind", ["mp4", pytest.param("png", marks=pytest.mark.slow)])
def test_a_full_disk_is_one_line_and_keeps_what_is_finished(kind, tiny_demo, tmp_path, environment):
    """A disk of its own for the process, that has place for two clips or three."""
    disk = tmp_path / "disk"
    disk.mkdir()
    size = "12k" if kind == "mp4" else "48k"
    inside = f'mount -t tmpfs -o size={size} none "{disk}" && "$@"; code=$?'
    inside += f'; ls -A "{disk}"; exit $code'
    arguments = [*COMMAND, str(tiny_demo), *"abcdefgh", "--steps", "3"]
    arguments += ["--format", kind, "--out", str(disk)]
    ran = subprocess.run(
        [str(UNSHARE), "-Urm", "sh", "-c", inside, "sh", *arguments],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert ran.returncode == 2, ran.stderr
    done = ran.stdout.split()
    assert 1 <= len(done) < 8
    assert done == [f"{letter}-seed0.{kind}" for letter in "abcdefgh"[: len(done)]]
    failed = disk / f"{'abcdefgh'[len(done)]}-seed0.{kind}"
    assert ran.stderr == (
        f"diffcache: the disk is full, {failed} was not written: free space, or write elsewhere "
        f"({len(done)} of 8 clips are finished, in {disk})\n"
    )


@pytest.mark.parametrize("kind", ["mp4", pytest.param("gif", marks=pytest.mark.slow)])
def test_a_limit_on_files_is_one_line_and_leaves_nothing(kind, tiny_demo, tmp_path, environment):
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))

    arguments = [str(tiny_demo), "a", "--steps", "3", "--format", kind, "--out", str(tmp_path)]
    ran = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=environment, preexec_fn=limit
    )
    assert ran.returncode == 2, ran.stderr
    assert ran.stderr.startswith("diffcache: ") and ran.stderr.count("\n") == 1
    assert f"a-seed0.{kind} is larger than a file may be here: raise `ulimit -f`" in ran.stderr
    assert finished(tmp_path) == []


def test_ctrl_c_keeps_finished_clips_and_no_half_one(tiny_demo, tmp_path, environment):
    out, page = tmp_path / "out", tmp_path / "page.html"
    arguments = [str(tiny_demo), "a", "--seeds", "0-99", "--steps", "60", "--compare"]
    arguments += ["--out", str(out), "--report", str(page)]
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    deadline = time.monotonic() + 120
    while not (out / "a-seed1.mp4").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.02)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    shown, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert shown == "" and said.count("\n") == 1
    names = finished(out)
    assert all(name.endswith(".mp4") and is_whole(out / name) for name in names)
    # The last pair may have been written, in part or whole, when the signal came.
    done = page.read_text(encoding="utf-8").count("Computed and reused steps")
    assert 2 <= done < 99
    assert said == f"diffcache: stopped ({done} of 100 clips are finished, in {out})\n"
    pairs = {f"a-seed{seed}{end}.mp4" for seed in range(done) for end in ("", "-uncached")}
    extra = {f"a-seed{done}.mp4", f"a-seed{done}-uncached.mp4"}
    assert pairs <= set(names) <= pairs | extra


@pytest.mark.slow
def test_a_hub_id_runs_from_the_local_cache(tiny_demo, tmp_path, environment):
    """The cache is laid out as huggingface_hub does; there is no network."""
    commit = "0123456789012345678901234567890123456789"
    model = tmp_path / "hub" / "models--owner--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    shutil.copytree(tiny_demo, model / "snapshots" / commit)
    size = ["--height", "32", "--width", "32", "--frames", "5", "--steps", "4"]
    ran = subprocess.run(
        [*COMMAND, "owner/tiny", "a", *size, "--out", str(tmp_path / "x.png")],
        capture_output=True,
        text=True,
        env={**environment, "HF_HOME": str(tmp_path)},
    )
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "x.png").is_file()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as somebody else")
def test_a_folder_of_somebody_else_is_named_before_any_work(tmp_path):
    """As the user `nobody`: root may write everywhere."""
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)

    from diffcache.cli.run_files import make_folder

    pid = os.fork()
    if not pid:
        os.setuid(65534)
        try:
            make_folder(folder)
        except ValueError as error:
            os._exit(7 if "permission denied" in str(error) else 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7

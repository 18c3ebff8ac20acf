"""The command as a whole: help, errors, exit status, what it imports."""

import subprocess
import sys

import pytest

from diffcache import __version__
from diffcache.cli import demo_model_path

COMMANDS = ("demo", "run", "inspect", "list", "overhead", "doctor")


def test_without_arguments_it_shows_the_commands(diffcache):
    ran = diffcache()
    assert ran.code == 0
    assert all(command in ran.out for command in COMMANDS)


def test_version(diffcache):
    assert diffcache("--version").out.strip() == __version__


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_and_json(diffcache, command):
    ran = diffcache(command, "--help")
    assert ran.code == 0
    assert f"Example: diffcache {command}" in ran.out
    assert "--json" in ran.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nothing",), "--help"),
        (("demo", "--stepz", "3"), "diffcache demo --help"),
        (("demo", "--prompts", "0"), "--prompts"),
        (("demo", "--prompts", "1000"), "--prompts must be between 1 and"),
        (("inspect",), "diffcache inspect --help"),
        (("inspect", "WanPipelin"), "WanPipeline"),
        (("inspect", "no/such/folder"), "neither a folder nor a class"),
        (("inspect", "AutoencoderKLWan"), "no denoiser"),
        (("inspect", "WanPipeline", "--policy", "forcast"), "did you mean 'forecast'"),
        (("overhead", "--calls", "1"), "--calls"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(
    diffcache, arguments, says, tiny_demo, monkeypatch
):
    monkeypatch.setattr("diffcache.cli.demo.demo_model_path", lambda: tiny_demo)
    ran = diffcache(*arguments)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("diffcache: ")
    assert ran.err.count("\n") == 1
    assert says in ran.err


def test_an_error_nobody_foresaw_has_no_traceback_unless_asked_for(diffcache, monkeypatch):
    def broken():
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("diffcache.registry.policies", broken)
    ran = diffcache("list")
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert "RuntimeError: first line second line" in ran.err
    monkeypatch.setenv("DIFFCACHE_TRACEBACK", "1")
    from diffcache.cli import main

    with pytest.raises(RuntimeError, match="second line"):
        main(["list"])


def test_ctrl_c_has_the_status_that_shells_expect(diffcache, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("diffcache.registry.policies", interrupted)
    ran = diffcache("list")
    assert ran.code == 130
    assert ran.err.strip() == "diffcache: stopped"


def test_help_loads_nothing_heavy():
    script = (
        "import sys\n"
        "from diffcache.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'diffusers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip().endswith("[]"), done.stdout + done.stderr


def test_a_missing_demo_model_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr("diffcache.cli.__file__", str(tmp_path / "diffcache/cli/__init__.py"))
    monkeypatch.setattr("diffcache.cli.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="reinstall"):
        demo_model_path()

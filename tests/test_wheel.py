"""The wheel holds what the tree holds, and works where no checkout is near."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

MOVED = {
    "kernels": "diffcache/kernels",
    "pipelines": "diffcache/pipelines",
    "world_models": "diffcache/world_models",
    "samples/models/demo-wan": "diffcache/demo_model",
}
CODE = ("diffcache", "kernels", "pipelines", "world_models")
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.pyc", "*.egg-info")


def _files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return [p for p in found if "__pycache__" not in p.parts and not p.name.startswith(".")]


def _expected(root: Path) -> set[str]:
    """Where each file of the tree goes in the wheel."""
    names = {f.relative_to(root).as_posix() for f in _files(root / "diffcache")}
    for folder, package in MOVED.items():
        base = root / folder
        names |= {f"{package}/{f.relative_to(base).as_posix()}" for f in _files(base)}
    return names


@pytest.fixture(scope="module")
def wheel(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built offline from a copy, so that no old build/ can add files to it."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repo_root / name, source)
    for name in (*CODE, "samples/models/demo-wan"):
        if (repo_root / name).is_dir():
            shutil.copytree(repo_root / name, source / name, ignore=NOT_SHIPPED)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-build-isolation", "--wheel-dir", str(target), str(source)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return next(target.glob("diffcache-*.whl"))


def test_wheel_and_tree_hold_the_same_files(wheel: Path, repo_root: Path) -> None:
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert sorted(names - _expected(repo_root)) == []
    assert sorted(_expected(repo_root) - names) == [], "add the package in pyproject.toml"


def test_wheel_carries_the_licence_and_the_demo_model(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert "diffcache/demo_model/model_index.json" in names
    assert wheel.stat().st_size < 10 * 2**20


PROGRAM = """
import pathlib, diffcache, diffcache.cli
from diffcache import pipelines
here = pathlib.Path(diffcache.__file__).parent
assert here.parent == pathlib.Path({home!r}), here
assert list(diffcache.__path__) == [str(here)], "the wheel looks for its parts in site-packages"
assert [pathlib.Path(p) for p in pipelines.__path__] == [here / "pipelines"], pipelines.__path__
assert (diffcache.cli.demo_model_path() / "model_index.json").is_file()
assert pathlib.Path(diffcache.cli.demo_model_path()).is_relative_to(here)
print(*diffcache.policies())
"""


def test_wheel_works_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(home)
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(home=str(home))],
        cwd=elsewhere,
        env={**os.environ, "PYTHONPATH": str(home)},
        capture_output=True,
        text=True,
    )
    assert out.returncode == 0, out.stderr
    assert "balanced" in out.stdout

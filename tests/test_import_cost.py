"""`import diffcache` is cheap and pulls in no model library."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS_BEYOND_TORCH = 0.3
RUNS = 3

# torch goes first in the same process, so the clock sees what diffcache adds to it. It counts CPU
# time, which a busy machine does not stretch.
PROGRAM = """
import json, sys, time
import torch
before, start = set(sys.modules), time.process_time()
import diffcache
for name in diffcache.__all__:
    getattr(diffcache, name)
seconds = time.process_time() - start
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def _import_once(repo_root: Path) -> tuple[float, set[str]]:
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=repo_root,
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, modules = json.loads(out.stdout)
    return seconds, {name.partition(".")[0] for name in modules}


@pytest.fixture(scope="module")
def imported(repo_root: Path) -> list[tuple[float, set[str]]]:
    """CPU seconds and new top-level modules of several fresh imports, every public name touched."""
    return [_import_once(repo_root) for _ in range(RUNS)]


def test_import_is_cheap(imported: list[tuple[float, set[str]]]) -> None:
    assert statistics.median(seconds for seconds, _ in imported) < SECONDS_BEYOND_TORCH


def test_import_leaves_model_libraries_alone(imported: list[tuple[float, set[str]]]) -> None:
    _, modules = imported[0]
    heavy = {"diffusers", "transformers", "accelerate", "triton", "xformers", "imageio", "PIL"}
    assert modules & heavy == set()


def test_the_command_line_starts_without_model_libraries(repo_root: Path) -> None:
    program = "import sys, diffcache.cli; print({'diffusers', 'transformers'} & set(sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=repo_root, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "set()"

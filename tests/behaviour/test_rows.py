"""Each public complaint about caches of this kind has a test; README.md lists them.

`python tests/behaviour/test_rows.py` writes the list anew.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
README = Path(__file__).with_name("README.md")
MARK, END = "<!-- complaints -->", "<!-- end -->"
# Row 24, a cache that outlives its node, belongs to the ComfyUI node's own tests.
COMPLAINTS = {
    1: ("diffusers #12012", "no cache context, so the cache raised"),
    2: ("diffusers PR #14093", "switched on after a first call: the hooks saw no context"),
    3: ("diffusers #14025", "two experts counted as if each saw all steps"),
    4: ("vllm-omni PR #1392", "transformer_2 is None"),
    5: ("cache-dit #210", "one warm-up for both experts"),
    6: ("vllm-omni #4632", "no speed-up and no error"),
    7: ("cache-dit #540", "the step count had to be known"),
    8: ("TeaCache #37", "size mismatch at another resolution"),
    9: ("sglang PR #16490", "a warm-up call poisoned the next one"),
    10: ("unsloth PR #6703", "stale state after a cancelled run"),
    11: ("nunchaku PR #601", "items of a batch decide for each other"),
    12: ("ComfyUI-TeaCache #158", "batched and split guidance mixed"),
    13: ("raylight #44", "a skipped step had the input's channels"),
    14: ("vllm-omni #6180", "one rank skipped, the others waited"),
    15: ("cache-dit #1089", "cache, quantization and compile together failed"),
    16: ("cache-dit #76", "slower under compile"),
    17: ("cache-dit #443", "broke under offload"),
    18: ("WanVideoWrapper #341", "out of memory"),
    19: ("diffusers PR #13497", "memory kept after the run"),
    20: ("ComfyUI-MagCache #33", "only some step counts allowed"),
    21: ("ComfyUI-MagCache #17", "the skip counter ran away"),
    22: ("ComfyUI-MagCache #7", "chunked video of few steps lost its quality"),
    23: ("sglang #33827", "blocks that write into their input: NaN, nothing cached"),
    25: ("ComfyUI-TeaCache #118", "broke with each update of the host"),
    26: ("mold PR #939", "a threshold that never fired"),
    27: ("WanVideoWrapper #811", "few steps, and strengths below one"),
    28: ("cache-dit #358", "many steps cached, little time saved"),
    29: ("cache-dit #622", "snow and black regions"),
    30: ("cache-dit PR #1102", "one pipeline switched off, all raised"),
    31: ("Comfy-WaveSpeed #36", "a LoRA had to come first"),
    32: ("vllm-omni PR #4937", "the conditioning image was not looked at"),
    33: ("MagCache #32", "the curve was the same for all prompts"),
    34: ("PR #11180", "guidance with three passes"),
}


@cache
def marked() -> dict[int, list[tuple[str, str]]]:
    """For each row the tests that are marked with it: "file::name" and docstring."""
    found: dict[int, list[tuple[str, str]]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                name = f"{path.relative_to(TESTS).as_posix()}::{node.name}"
                for row in rows_of(node):
                    found.setdefault(row, []).append((name, ast.get_docstring(node) or ""))
    return found


def rows_of(test: ast.FunctionDef) -> Iterator[int]:
    for decorator in test.decorator_list:
        match = re.fullmatch(r"pytest\.mark\.peer_row\((\d+)\)", ast.unparse(decorator))
        if match:
            yield int(match[1])


def table() -> str:
    lines = ["| row | reported in | what a user saw | tests here |", "|---|---|---|---|"]
    tests = marked()
    for row, (report, symptom) in COMPLAINTS.items():
        names = "<br>".join(f"`{name}`" for name, _ in tests.get(row, []))
        lines.append(f"| {row} | {report} | {symptom} | {names} |")
    return "\n".join(lines) + "\n"


def readme() -> str:
    """README.md with the table as it should be."""
    before, _, rest = README.read_text(encoding="utf-8").partition(MARK)
    return f"{before}{MARK}\n{table()}{END}{rest.partition(END)[2]}"


@pytest.mark.parametrize("row", COMPLAINTS)
def test_every_complaint_has_a_test(row):
    """And one that names the public report in its docstring."""
    report, _ = COMPLAINTS[row]
    assert any(report in docstring for _, docstring in marked().get(row, [])), report


def test_no_mark_is_wrong():
    """All marks name a complaint of the list."""
    assert set(marked()) == set(COMPLAINTS)


def test_the_list_is_up_to_date():
    """README.md is what this file writes."""
    assert README.read_text(encoding="utf-8") == readme(), f"run `python {Path(__file__).name}`"


if __name__ == "__main__":
    README.write_text(readme(), encoding="utf-8")

"""README says what the code does: policies, commands, targets and snippets are compared with it.

`python tests/test_readme.py` (or `make readme`) writes the table of policies anew, that of presets
from samples/bench, and that of results from the last `make demo`, if there was one.
"""

from __future__ import annotations

import ast
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import diffcache

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PRESETS = ("quality", "balanced", "fast")
PRESET_COLUMNS = ("Steps, scheduler", "Preset", "Computed", "Speed-up")
PRESET_COLUMNS += ("PSNR", "Worst 5 %", "Minimum", "Over fewer steps")
RESULT_COLUMNS = ("Method", "Settings", "Computed", "Speed-up", "CPU time", "Whole call")
RESULT_COLUMNS += ("PSNR", "Worst 5 %", "Minimum", "SSIM")
REPORT = ROOT / "out" / "demo" / "report.json"
BENCH = ROOT / "samples" / "bench"


def readme() -> str:
    return README.read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def section(title: str) -> str:
    return readme().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def make_targets(text: str) -> set[str]:
    return set(re.findall(r"^make (\w+)", text, re.MULTILINE))


def part(name: str) -> str:
    """What stands between `<!-- name -->` and `<!-- end -->`."""
    return readme().partition(f"<!-- {name} -->")[2].partition("<!-- end -->")[0].strip()


def with_part(text: str, name: str, body: str) -> str:
    head, mark, rest = text.partition(f"<!-- {name} -->\n")
    return head + mark + body + "\n<!-- end -->" + rest.partition("<!-- end -->")[2]


def policy_table() -> str:
    """README's table of policies as the registry has them."""
    rows = ["| Policy | What it does | Exact at | Source |", "| --- | --- | --- | --- |"]
    for name in diffcache.policies():
        policy = diffcache.get_policy(name)
        exact = ", ".join(f"`{key}={value}`" for key, value in policy.exact.items())
        source = re.sub(r"arXiv (\d+\.\d+)", r"[arXiv \1](https://arxiv.org/abs/\1)", policy.source)
        rows.append(f"| `{name}` | {policy.summary} | {exact} | {source} |")
    return "\n".join(rows)


def preset_table() -> str:
    """README's table of the presets from the bench's CSV files."""
    rows = [f"| {' | '.join(PRESET_COLUMNS)} |", "| --- | ---" + " | --:" * 6 + " |"]
    names = {"unipc": "UniPC", "euler": "Euler"}
    for path in sorted(BENCH.glob("*/bench.csv"), reverse=True):
        with path.open(encoding="utf-8", newline="") as file:
            found = [row for row in csv.DictReader(file) if row["method"] in PRESETS]
        found.sort(key=lambda row: (row["scheduler"] != "unipc", PRESETS.index(row["method"])))
        for row in found:
            psnr = " | ".join(
                f"{float(row[key]):.1f}" for key in ("psnr_mean", "psnr_p5", "psnr_min")
            )
            over = [row[f"{key}_vs_fewer"] for key in ("psnr_mean", "psnr_p5")]
            above = " / ".join(f"{float(cell):+.1f}" for cell in over if cell)  # none: out of range
            rows.append(
                f"| {row['steps']}, {names[row['scheduler']]} | `{row['method']}` "
                f"| {float(row['computed']):.3g} | {float(row['speedup']):.2f} | {psnr} "
                f"| {above} |"
            )
    return "\n".join(rows)


def results(figures: dict[str, Any]) -> str:
    """README's table of results from what `diffcache demo` wrote to report.json."""
    where, full = figures["environment"], figures["reference"]
    lines = [
        f"{where['clips']} clips of the demo model, {where['num_frames']} frames of "
        f"{where['width']} x {where['height']}, {full['steps']} steps, one thread",
        f"({where['processor']}, torch {where['torch']}, diffusers {where['diffusers']}, fp32):",
        "",
        f"| {' | '.join(RESULT_COLUMNS)} |",
        f"| --- | ---{' | --:' * (len(RESULT_COLUMNS) - 2)} |",
        f"| reference | | {full['computed']:g} of {full['steps']} | 1.00 | 1.00 | 1.00 | | | | |",
    ]
    for row in figures["rows"]:
        name = f"`{row['name']}`" if row["name"] in diffcache.policies() else row["name"]
        psnr = [row[key] for key in ("psnr_mean", "psnr_p5", "psnr_min")]
        settings = ", ".join(f"{key}={value}" for key, value in row["settings"].items())
        cells = [
            name,
            settings and f"`{settings}`",
            f"{row['computed']:g} of {row['steps']:g}",
            *(f"{row[key]:.2f}" for key in ("speedup", "speedup_cpu", "speedup_total")),
            *("identical" if value is None else f"{value:.1f}" for value in psnr),
            f"{row['ssim_mean']:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_policy_table_is_the_registry() -> None:
    assert part("policies") == policy_table(), "run `make readme`"


def test_preset_table_is_the_bench() -> None:
    assert part("presets") == preset_table(), "run `make readme`"


def test_the_bench_measured_the_presets_as_they_are() -> None:
    for path in BENCH.glob("*/settings.json"):
        measured = json.loads(path.read_text(encoding="utf-8"))["policies"]
        for name in PRESETS:
            now = json.loads(json.dumps(diffcache.get_policy(name).to_dict()))
            assert measured[name] == now, f"{name} changed: run the bench again"


def test_results_list_the_methods_of_the_demo() -> None:
    from diffcache.cli.demo_run import METHODS

    names = re.findall(r"^\| `?([^|`]+?)`? \|", part("results"), re.MULTILINE)
    expected = ["Method", "---", "reference", *(method.name for method in METHODS)]
    assert names == expected, "run `make demo`, then `make readme`"


def test_command_table_is_the_command_line() -> None:
    from typer.main import get_command

    from diffcache.cli.app import build

    listed = re.findall(r"^\| `diffcache ([\w-]+)`", section("Command line"), re.MULTILINE)
    assert sorted(listed) == sorted(get_command(build()).commands)  # type: ignore[attr-defined]


def test_every_shell_command_exists() -> None:
    from typer.main import get_command

    from diffcache.cli.app import build

    known = get_command(build()).commands  # type: ignore[attr-defined]
    shell = "".join(blocks(readme(), "sh"))
    assert {c for c in re.findall(r"\bdiffcache (\w+)", shell) if c not in known} == set()
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    named = re.findall(r"`?make ([a-z]+)`?", shell + (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert set(named) <= set(targets)


def test_ci_runs_the_commands_of_the_readme() -> None:
    in_readme = make_targets("".join(blocks(readme(), "sh")))
    assert make_targets((ROOT / ".ci" / "run").read_text("utf-8")) == in_readme


@pytest.mark.parametrize("source", blocks(README.read_text("utf-8"), "python"))
def test_snippets_compile_and_name_what_exists(source: str) -> None:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "diffcache":
                assert node.attr in diffcache.__all__
        elif isinstance(node, ast.Call):
            _check_policy_names(node)


def _check_policy_names(call: ast.Call) -> None:
    """A string given to wrap or get_policy names a policy, and its settings are that policy's."""
    if ast.unparse(call.func) not in ("diffcache.wrap", "diffcache.get_policy"):
        return
    names = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
    settings = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg != "strict"}
    for name in names:
        if not str(name).endswith((".json", ".yaml")):
            diffcache.get_policy(name, **settings)


def test_length() -> None:
    """600 to 900 words, without code and without the tables that `make readme` writes."""
    prose = re.sub(r"^```.*?^```", "", readme(), flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(
        r"<!-- (policies|presets|results) -->.*?<!-- end -->", "", prose, flags=re.DOTALL
    )
    words = [word for word in prose.split() if re.search(r"\w", word)]
    assert 600 <= len(words) <= 900


@pytest.mark.slow
def test_contributing_adds_a_policy_with_one_file(tmp_path: Path) -> None:
    """Follows CONTRIBUTING literally, in a copy of the checkout."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    target, source = re.search(r"`(\S+/(\w+)\.py)`:\n", text), blocks(text, "python")[0]
    assert target is not None
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "out", "__pycache__", "*.egg-info")
    copy = tmp_path / "checkout"
    shutil.copytree(ROOT, copy, ignore=ignored)
    (copy / target[1]).write_text(source, encoding="utf-8")

    def run(*arguments: str, status: int = 0) -> str:
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        command = [sys.executable, *arguments]
        out = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
        assert out.returncode == status, out.stdout + out.stderr
        return out.stdout

    check = ("-m", "pytest", "-q", "tests/test_readme.py", "-k", "policy_table")
    assert "make readme" in run(*check, status=1)
    run("tests/test_readme.py")
    run(*check)
    run("-m", "pytest", "-q", "tests", "-k", target[2])
    assert target[2] in run("-c", "from diffcache.cli import main; main(['list'])")


if __name__ == "__main__":
    text = with_part(readme(), "policies", policy_table())
    text = with_part(text, "presets", preset_table())
    if REPORT.is_file():
        text = with_part(text, "results", results(json.loads(REPORT.read_text(encoding="utf-8"))))
    README.write_text(text, encoding="utf-8")

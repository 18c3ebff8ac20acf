"""Who may import whom: world_models -> pipelines -> core -> kernels -> torch, triton."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("diffcache", "kernels", "pipelines", "world_models")
MOVED = ("kernels", "pipelines", "world_models")
FRONT = ("api", "calibrate", "cli", "comfyui", "llm", "magnitudes", "restore")
ALLOWED = {
    "kernels": {"kernels"},
    "features": {"features", "core", "kernels"},
    "kv": {"kv", "core", "kernels"},
    "core": {"core", "features", "kv", "kernels"},
    "pipelines": {"pipelines", "core", "features", "kv", "kernels"},
    "world_models": {"world_models", "pipelines", "core", "features", "kv", "kernels"},
}
HOSTS = {"diffusers", "transformers"}
MAX_LINES = 400

Import = tuple[str, int, bool]  # module, line, whether it runs when the file is imported


def source_files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    """The import name: kernels/masks.py -> diffcache.kernels.masks."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "diffcache" else ("diffcache", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The room of a dotted name: one of ALLOWED, "front", or "" for what is not ours."""
    first, _, rest = module.partition(".")
    if first != "diffcache":
        return ""
    second = rest.partition(".")[0]
    if second in FRONT or not second:
        return "front"
    return second if second in ALLOWED else "core"


def imports(tree: ast.AST, package: str, modules: set[str]) -> Iterator[Import]:
    """Every import below `tree`; `from x import y` counts as x.y where that is a module."""
    for node, at_import in _walk(tree, True):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            )
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{source}.{alias.name}"
                yield (full if full in modules else source), node.lineno, at_import


def _walk(node: ast.AST, at_import: bool) -> Iterator[tuple[ast.AST, bool]]:
    """The nodes, each with whether it is executed on import (not in a function, not for types)."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from ((inner, False) for inner in ast.walk(child))
            continue
        inside = at_import and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        yield child, inside
        yield from _walk(child, inside)


def package_of(path: Path) -> str:
    name = module_name(path)
    return name if path.name == "__init__.py" else name.rpartition(".")[0]


def violations(path: Path, source: str, modules: set[str]) -> list[str]:
    """One line for each import in `source` that its place in the tree forbids."""
    own = room(module_name(path))
    found = []
    for module, line, at_import in imports(ast.parse(source), package_of(path), modules):
        target, top = room(module), module.partition(".")[0]
        if top in MOVED:
            found.append(f"{path.name}:{line}: write diffcache.{module}")
        elif own == "front":
            if at_import and (target in ("pipelines", "world_models") or top in HOSTS):
                found.append(
                    f"{path.name}:{line}: import {module} inside the function that needs it"
                )
        elif target and target not in ALLOWED[own]:
            found.append(f"{path.name}:{line}: {own} may not import {module}")
        elif top in HOSTS and own not in ("pipelines", "world_models"):
            found.append(f"{path.name}:{line}: only pipelines/ knows {top}")
    return found


MODULES = {module_name(path) for path in source_files()}


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path: Path) -> None:
    assert violations(path, path.read_text(encoding="utf-8"), MODULES) == []


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("kernels/masks.py", "from diffcache.policy import Policy"),
        ("diffcache/features/gates.py", "from ..kv import store"),
        ("diffcache/features/gates.py", "import diffcache"),
        ("diffcache/kv/store.py", "def f():\n    from ..features.base import near"),
        ("diffcache/hooks.py", "from .api import wrap"),
        ("diffcache/hooks.py", "from diffusers import WanPipeline"),
        ("diffcache/context.py", "import diffcache.pipelines.wan"),
        ("diffcache/api.py", "import diffcache.pipelines.wan"),
        ("diffcache/cli/demo.py", "from diffusers import WanPipeline"),
        ("pipelines/wan.py", "import kernels.masks"),
        ("pipelines/wan.py", "from diffcache.world_models import driving"),
    ],
)
def test_a_forbidden_import_is_found(place: str, source: str) -> None:
    assert len(violations(ROOT / place, source, MODULES | {"diffcache.kv.store"})) == 1


def test_a_lazy_import_in_a_front_door_is_allowed() -> None:
    source = "def f():\n    from diffusers import WanPipeline\n    import diffcache.pipelines.wan"
    assert violations(ROOT / "diffcache/api.py", source, MODULES) == []


@pytest.mark.parametrize("folder", MOVED)
def test_moved_folders_have_no_init(folder: str) -> None:
    """kernels/__init__.py breaks transformers where Hugging Face's `kernels` is installed."""
    assert not (ROOT / folder / "__init__.py").exists()


def test_no_file_is_too_long() -> None:
    files = [*source_files(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "samples").rglob("*.py")]
    lengths = {str(f.relative_to(ROOT)): len(f.read_text("utf-8").splitlines()) for f in files}
    assert {name: count for name, count in lengths.items() if count > MAX_LINES} == {}

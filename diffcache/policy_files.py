"""Policies on disk, of features and of KV alike: one mapping in JSON or YAML."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from .parts import near

PolicyT = TypeVar("PolicyT")


def write(path: str | Path, description: Mapping[str, Any]) -> None:
    """Writes .json, .yaml or .yml.

    Raises:
        ValueError: another ending.
    """
    path = Path(path)
    text = json.dumps(description, indent=2) + "\n"
    if _is_yaml(path):
        import yaml

        text = yaml.safe_dump(json.loads(text), sort_keys=False)  # without tuples
    path.write_text(text, encoding="utf-8")


def read(path: str | Path, make: Callable[[Mapping[str, Any]], PolicyT]) -> PolicyT:
    """What `make` makes of the mapping in a file.

    Raises:
        ValueError: the file is no policy; the message names it.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    parse = _from_yaml if _is_yaml(path) else _from_json
    if not path.is_file():
        raise FileNotFoundError(f"there is no policy file {path}: check its path")
    try:
        description = parse(path.read_text(encoding="utf-8"))
        if not isinstance(description, dict):
            raise ValueError("a policy file holds one mapping")
        return make(description)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def entries(
    description: Mapping[str, Any],
    *,
    marker: tuple[str, int],
    what: str,
    known: Mapping[str, Any],
    needed: Iterable[str],
) -> dict[str, Any]:
    """A file's entries without its marker ("diffcache_policy", 1).

    Raises:
        ValueError: another kind of file or another format, unknown or missing keys.
    """
    settings, (key, form) = dict(description), marker
    version = settings.pop(key, None)
    if version != form:
        raise ValueError(f"{key} must be {form}, got {version!r}: another kind of file or version")
    for name in settings:
        if name not in known:
            raise ValueError(f"a {what} has no key {name!r}; {near(name, known)}")
    missing = [name for name in needed if name not in settings]
    if missing:
        raise ValueError(f"the {what} lacks {', '.join(missing)}")
    return settings


def _from_yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from error


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error


def _is_yaml(path: Path) -> bool:
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ValueError(f"{path}: a policy file ends in .json, .yaml or .yml")
    return path.suffix != ".json"

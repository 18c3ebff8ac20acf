"""Results of the bench on disk: a line for each clip of each method, so that runs resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .output import to_json

SETTINGS, CLIPS = "settings.json", "clips.jsonl"
KEY = ("scheduler", "steps", "prompt", "seed", "method")


class Results:
    """The folder of one bench.

    Attributes:
        settings: what is measured; a run with others is refused.
        lines: what was measured, in order; a method that does not run here has "failed", the
            reason, and no clip.

    Raises:
        ValueError: the folder holds another bench's results and `force` is not given.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], force: bool) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        wanted = json.loads(to_json(settings))
        path = folder / SETTINGS
        if not force:
            _refuse_others(folder, wanted)
        if force or not path.exists():
            (folder / CLIPS).unlink(missing_ok=True)
            path.write_text(to_json(settings) + "\n", encoding="utf-8")
        self.settings = wanted
        self.lines = self._load()
        self._known = {_key(line) for line in self.lines}

    def has(self, **key: Any) -> bool:
        """Whether this clip of this method was measured (all names of KEY)."""
        return _key(key) in self._known

    def failed(self, scheduler: str, steps: int) -> dict[str, str]:
        """{method: why it does not run} under one condition."""
        return {
            line["method"]: line["failed"]
            for line in self.lines
            if "failed" in line and (line["scheduler"], line["steps"]) == (scheduler, steps)
        }

    def add(self, **line: Any) -> None:
        """Appends a line, at once on the disk."""
        text = json.dumps(json.loads(to_json(line)), ensure_ascii=False)
        with (self.folder / CLIPS).open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        self.lines.append(json.loads(text))
        self._known.add(_key(line))

    def _load(self) -> list[dict[str, Any]]:
        """All whole lines; one that a killed process left unfinished is cut off."""
        path = self.folder / CLIPS
        if not path.exists():
            return []
        # Bytes, and "\n" alone: a prompt may hold the separators that Unicode counts as line ends.
        whole, _, rest = path.read_bytes().rpartition(b"\n")
        if rest:
            path.write_bytes(whole + b"\n" if whole else b"")
        try:
            return [json.loads(line) for line in whole.split(b"\n") if line]
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}): --force starts over") from error


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line.get(name) for name in KEY)


def _refuse_others(folder: Path, wanted: dict[str, Any]) -> None:
    path, remedy = folder / SETTINGS, "give another --out, or --force to start over"
    if not path.exists():
        if (folder / CLIPS).exists():
            raise ValueError(f"{folder} holds clips without their {SETTINGS}: {remedy}")
        return
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): {remedy}") from error
    others = [name for name in wanted if found.get(name) != wanted[name]]
    if others:
        raise ValueError(
            f"{folder} holds a run with other settings ({', '.join(others)}): {remedy}"
        )

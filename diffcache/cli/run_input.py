"""What `diffcache run` is asked for: prompts, seeds, settings of the policy."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORDS = {"true": True, "false": False, "none": None, "null": None}
MAX_SEED = 2**63 - 1


def read_prompts(arguments: Sequence[str], file: Path | None) -> list[str]:
    """The prompts of the command line, then those of a file: one on each line, empty ones skipped.

    Raises:
        ValueError: no prompt, an empty one, text that is not UTF-8, no such file.
    """
    for number, prompt in enumerate(arguments, 1):
        if not prompt.strip():
            raise ValueError(f"prompt {number} is empty: write what the clip should show")
        if any("\ud800" <= letter <= "\udfff" for letter in prompt):
            raise ValueError(f"prompt {number} is not UTF-8: put it into a file, see --prompts")
    prompts = [*arguments, *(_lines(file) if file is not None else [])]
    if not prompts:
        raise ValueError('no prompt: write one after SOURCE ("a red circle"), or give --prompts')
    return prompts


def read_seeds(text: str) -> list[int]:
    """[0, 1, 2, 7] from "0-2,7".

    Raises:
        ValueError: not of this form, out of range, or the same seed twice.
    """
    seeds: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"--seeds must be like 7 or 0,1,5 or 0-3, got {text!r}")
        low, high = int(first), int(last or first)
        if not low <= high <= MAX_SEED or high - low >= 10_000:
            raise ValueError(f"--seeds must rise, stay below 2**63 and be few, got {text!r}")
        seeds += range(low, high + 1)
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds names a seed twice: {text}")
    return seeds


def read_settings(pairs: Sequence[str], option: str = "--set") -> dict[str, Any]:
    """{"fraction": 0.5} from ["fraction=0.5"]; values are JSON, or else text.

    Args:
        option: what errors call the place where they were given.

    Raises:
        ValueError: no "=", or a name twice.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip()
        if not equals or not name:
            raise ValueError(f"{option} takes name=value, such as fraction=0.5, got {pair!r}")
        if name in settings:
            raise ValueError(f"{option}: {name} is given twice")
        settings[name] = _value(value.strip())
    return settings


def _value(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return json.loads(text)
    except ValueError:
        return text


def _lines(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from error
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ValueError(f"prompts file {file} cannot be read: {why}") from error
    # Not splitlines: a prompt may hold the separators that Unicode counts as line ends.
    lines = [line.strip() for line in text.replace("\r", "\n").split("\n")]
    found = [line for line in lines if line]
    if not found:
        raise ValueError(f"{file} holds no prompt: write one on each line")
    return found

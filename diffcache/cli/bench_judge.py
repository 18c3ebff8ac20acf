"""Imports the function that reads attributes off a clip, for `diffcache bench --judge`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

Judge = Callable[[Any, str], dict[str, Any]]  # of frames [F, H, W, 3] in [0, 1] and the prompt


def load_judge(name: str) -> Judge:
    """The function that "module:function" names; the module may lie in the current folder.

    Raises:
        ValueError: not of that form, or it cannot be imported.
    """
    module, _, function = name.partition(":")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:  # an installed command does not look into the current folder by itself
        sys.path.append(here)
    try:
        judge: Judge = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"--judge takes module:function, got {name!r} ({error})") from error
    finally:
        if added:
            sys.path.remove(here)
    return judge

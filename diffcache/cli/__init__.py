"""The `diffcache` command: one small module for each subcommand."""

import errno
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

__all__ = ["demo_model_path", "main"]

INTERRUPTED = 130  # 128 and SIGINT, as shells count


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0, 1 (from `doctor`), 2 with one line on stderr, or 130
    after Ctrl-C."""
    from .app import build
    from .output import Stopped

    try:
        code = build()(args=arguments, prog_name="diffcache", standalone_mode=False)
    except (KeyboardInterrupt, Stopped) as stop:
        _stopped(str(stop))
    except Exception as error:
        if type(error).__name__ == "Abort":  # what some releases of typer make of Ctrl-C
            _stopped()
        if os.environ.get("DIFFCACHE_TRACEBACK"):
            raise
        print(f"diffcache: {_one_line(error)}", file=sys.stderr)
        sys.exit(2)
    if code == INTERRUPTED:  # what others make of it
        _stopped()
    sys.exit(code if isinstance(code, int) else 0)


def _stopped(text: str = "") -> NoReturn:
    print(f"diffcache: {text or 'stopped'}", file=sys.stderr)
    sys.exit(INTERRUPTED)


def demo_model_path() -> Path:
    """The folder of the demo model: package data of the wheel, or samples/models of a checkout.

    Raises:
        FileNotFoundError: neither is there.
    """
    package = Path(__file__).parents[1]
    places = [package.parent / "samples" / "models" / "demo-wan"]
    spec = find_spec("diffcache.demo_model")
    if spec is not None:
        places = [*map(Path, spec.submodule_search_locations or ()), *places]
    for place in places:
        if (place / "model_index.json").is_file():
            return place
    raise FileNotFoundError("the demo model is not installed: reinstall diffcache from its wheel")


def _one_line(error: Exception) -> str:
    """What went wrong and what to do; for what we did not foresee, how to see more."""
    if hasattr(error, "format_message"):  # wrong usage, from the argument parser
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "diffcache"
        return f"{' '.join(error.format_message().split())} See {command} --help"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" ({error.filename})" if error.filename else ""
        return f"the disk is full{where}: free space, then give the same command again"
    text = " ".join(str(error).split()) or type(error).__name__
    foreseen = (ValueError, OSError, ImportError)
    if isinstance(error, foreseen) or type(error).__name__ == "DiffcacheError":
        return text
    return f"{type(error).__name__}: {text} (set DIFFCACHE_TRACEBACK=1 to see where)"

"""What every command prints with: JSON or tables on stdout, progress on stderr."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on stdout.")]


class Stopped(Exception):
    """Ctrl-C, with a line on what was finished before."""


def to_json(data: Any) -> str:
    """JSON text; a value that is no finite number becomes null."""
    return json.dumps(_plain(data), indent=2, ensure_ascii=False)


def show(renderable: Any) -> None:
    """Prints a rich table or text on stdout."""
    from rich.console import Console

    Console(width=None if Console().is_terminal else 120).print(renderable)


def table(
    title: str, header: list[str], rows: list[list[str]], words: int = 1, whole: str = ""
) -> Any:
    """A rich table; the first `words` columns are flush left, column `whole` is never wrapped."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold")
    for number, name in enumerate(header):
        justify: Any = "left" if number < words else "right"
        single = name == whole or number >= words
        made.add_column(name, justify=justify, no_wrap=single, overflow="fold")
    for cells in rows:
        made.add_row(*cells)
    return made


def progress() -> "Progress":
    """A progress bar on stderr where that is a terminal (a context manager)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def size(nbytes: float) -> str:
    """Bytes for people: "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def _plain(data: Any) -> Any:
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple, set, frozenset)):
        return [_plain(value) for value in data]
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, (str, int, bool, type(None))):
        return data
    return str(data) if isinstance(data, Path) else repr(data)

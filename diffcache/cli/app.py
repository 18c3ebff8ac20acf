"""Puts the subcommands together; the modules they need are imported when they run."""

from collections.abc import Callable
from typing import Any

import typer

from .. import __version__
from .bench import bench
from .demo import demo
from .doctor import doctor
from .inspect import inspect
from .list import list_policies
from .overhead import overhead
from .run import run

EXAMPLES: dict[Callable[..., Any], tuple[str, str]] = {
    demo: ("demo", "diffcache demo --prompts 2 --out out/demo"),
    run: ("run", 'diffcache run demo "a red circle moving left" --compare --out out/red.mp4'),
    bench: ("bench", "diffcache bench demo --scheduler unipc,euler --steps 50,20 --seeds 0-2"),
    inspect: ("inspect", "diffcache inspect WanPipeline --policy forecast --frames 81"),
    list_policies: ("list", "diffcache list --json"),
    overhead: ("overhead", "diffcache overhead --calls 500"),
    doctor: ("doctor", "diffcache doctor"),
}


def build() -> typer.Typer:
    """The command with all its subcommands."""
    app = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
    )

    @app.callback(invoke_without_command=True, epilog="Example: `diffcache demo`")
    def diffcache(
        context: typer.Context,
        version: bool = typer.Option(False, "--version", help="Print the version."),
    ) -> None:
        """Training-free caching for video diffusion, world models and multimodal LLMs."""
        if version:
            typer.echo(__version__)
        elif context.invoked_subcommand is None:
            typer.echo(context.get_help())

    for command, (name, example) in EXAMPLES.items():
        app.command(name, epilog=f"Example: `{example}`")(command)
    return app

"""`diffcache run`: makes clips from prompts with a policy, and compares if asked."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import JsonFlag, progress, show, table, to_json

if TYPE_CHECKING:
    from rich.progress import Progress

    from .run_clip import Steps
    from .run_task import Task

Pixels = Annotated[int | None, typer.Option(min=1, help="Pixels.")]


def run(
    source: Annotated[str, typer.Argument(help="A pipeline folder, a hub id, or: demo.")],
    prompt: Annotated[list[str] | None, typer.Argument(help="One clip for each.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A UTF-8 file with a prompt on each line.")
    ] = None,
    policy: Annotated[str, typer.Option(help="A policy's name or file.")] = "balanced",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the policy: fraction=0.5.")
    ] = None,
    seeds: Annotated[str, typer.Option("--seeds", "--seed", help="7, or 0,1,5, or 0-3.")] = "0",
    out: Annotated[
        Path, typer.Option(help="A folder, or a file ending in .mp4, .gif or .png.")
    ] = Path("out/run"),
    kind: Annotated[
        str | None,
        typer.Option("--format", help="mp4, gif or png (a sheet of all frames, or the image)."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what is there.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Make each clip without caching too, and compare.")
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Write a page (.html) on the run.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Solver steps.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale.")] = None,
    negative: Annotated[str | None, typer.Option(help="Negative prompt.")] = None,
    height: Pixels = None,
    width: Pixels = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Frames of a clip.")] = None,
    fps: Annotated[
        float | None, typer.Option(min=1, max=240, help="Frames a second of the file.")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="unipc, euler, heun or dpm instead of the pipeline's own.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps, offload.")] = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Makes a clip (or an image) for each prompt and seed, and says what was computed and reused.

    Options that are left out are the pipeline's own defaults (the demo model brings a small size).
    Files are named after prompt and seed; nothing is overwritten without --force. With --compare
    each clip is made without caching just before, in the same process and with the same seed, and
    written beside it.
    """
    from .run_call import Options
    from .run_input import read_prompts, read_seeds, read_settings
    from .run_task import Output, plan_task

    asked = Options(
        steps=steps,
        guidance=guidance,
        height=height,
        width=width,
        frames=frames,
        fps=fps,
        negative=negative,
    )
    task = plan_task(
        source,
        policy=(policy, read_settings(settings or [])),
        scheduler=scheduler,
        prompts=read_prompts(prompt or [], prompts),
        seeds=read_seeds(seeds),
        options=asked,
        output=Output(out=out, kind=kind, force=force, compare=compare, report=report),
    )
    figures = _work(task, dtype, device)
    if as_json:
        print(to_json(figures))
    else:
        _show(figures, task)


def _work(task: "Task", dtype: str, device: str) -> dict[str, Any]:
    """Loads the pipeline and makes all clips, with two bars: over the clips, over the steps."""
    from .loading import load_pipeline
    from .run_task import make_all

    with progress() as bar:
        clips = bar.add_task("loading", total=len(task.jobs))
        pipe = load_pipeline(task.source, dtype=dtype, device=device)
        bar.update(clips, description="clips")
        return make_all(task, pipe, _Bars(bar, clips))


class _Bars:
    """Shows where the work is: `clip` after each clip, `step` after each solver step."""

    def __init__(self, bar: "Progress", clips: Any) -> None:
        self.bar, self.clips = bar, clips
        self.steps = bar.add_task("", total=None, visible=False)

    def clip(self) -> None:
        self.bar.update(self.clips, advance=1)

    def step(self, what: str, steps: "Steps") -> None:
        counts = f"{steps.computed} computed, {steps.reused} reused" if steps.states else ""
        if steps.done == 1:
            self.bar.reset(self.steps)
        self.bar.update(
            self.steps,
            completed=steps.done,
            total=steps.total,
            description=f"{what} {counts}".rstrip(),
            visible=True,
        )


def _show(figures: dict[str, Any], task: "Task") -> None:
    from rich.markup import escape

    from .run_text import cells, header, lead, notes

    rows = [[escape(cell) for cell in cells(figures, clip)] for clip in figures["clips"]]
    show(f"[bold]{escape(lead(figures))}[/]")
    show(table("", header(figures), rows))
    for note in notes(figures):
        show(f"[yellow]Note:[/] {escape(note)}")
    if len(task.jobs) > 1:
        show(f"Clips: {escape(str(task.jobs[0].path.parent))}")
    else:
        show(f"Clip: {escape(figures['clips'][0]['path'])}")
    if task.report is not None:
        show(f"Report: {escape(str(task.report))}")

"""`diffcache bench`: policies, baselines and peers at equal terms, on any pipeline."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import JsonFlag, progress, show, table, to_json

if TYPE_CHECKING:
    from .bench_run import Plan
    from .run_call import Call


def bench(
    source: Annotated[str, typer.Argument(help="A pipeline folder, a hub id, or: demo.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A name or file, with settings: first_block:threshold=0.04|0.08."),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(help="unipc, euler, heun or dpm, also with a shift (unipc@5), with commas."),
    ] = None,
    steps: Annotated[str, typer.Option(help="Solver steps: one or several, with commas.")] = "50",
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeat for more.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A UTF-8 file with a prompt on each line.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first prompts.")] = None,
    seeds: Annotated[str, typer.Option(help="7, or 0,1,5, or 0-3: each prompt with each.")] = "0",
    peers: Annotated[
        bool, typer.Option("--peers", help="Add the caches of diffusers and cache-dit.")
    ] = False,
    peer_clips: Annotated[
        int | None, typer.Option(min=1, help="Peers on the first clips only; default all.")
    ] = None,
    judge: Annotated[
        str | None, typer.Option(help="module:function that reads attributes off a clip.")
    ] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale.")] = None,
    height: Annotated[int | None, typer.Option(min=1, help="Pixels.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Pixels.")] = None,
    frames: Annotated[int | None, typer.Option(min=1, help="Frames of a clip.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("out/bench"),
    force: Annotated[bool, typer.Option("--force", help="Start over.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    as_json: JsonFlag = False,
) -> None:
    """Measures speed and quality of policies against fewer steps, plain hold and peers.

    Every clip is made by all methods in turn, on one thread. A run that was stopped goes on where
    it stopped. Writes bench.csv, bench.json, clips.jsonl and a plot for each scheduler and number
    of steps.
    """
    from .bench_methods import ours, read_policies
    from .bench_plot import require_matplotlib
    from .bench_run import Plan
    from .loading import OFFLOAD, local_folder, pipeline_class
    from .run_call import Call, Options
    from .run_input import read_prompts, read_seeds
    from .schedulers import check_scheduler

    if device == OFFLOAD:
        raise ValueError("--device offload moves weights while the clock runs: give cpu or cuda")
    require_matplotlib()
    if peers:
        _tell_missing()
    folder = local_folder(source)
    options = Options(guidance=guidance, height=height, width=width, frames=frames)
    call = Call.plan(pipeline_class(source), options, folder)
    names = _schedulers(scheduler)
    for name in filter(None, names):
        check_scheduler(name)
    texts = read_prompts(prompt or _own_prompts(folder, prompts), prompts)[:limit]
    clips = tuple((text, seed) for seed in read_seeds(seeds) for text in dict.fromkeys(texts))
    plan = Plan(
        conditions=tuple((name, count) for count in _counts(steps) for name in names),
        clips=clips,
        methods=tuple(read_policies(policy) if policy else ours()),
        peers=peers,
        peer_clips=min(peer_clips or len(clips), len(clips)) if peers else 0,
        judge=judge,
    )
    _work(plan, source, call, (dtype, device), out, force, as_json)


def _work(
    plan: "Plan",
    source: str,
    call: "Call",
    place: tuple[str, str],
    out: Path,
    force: bool,
    as_json: bool,
) -> None:
    from .bench_judge import load_judge
    from .bench_report import report
    from .bench_run import measure
    from .bench_store import Results
    from .loading import load_pipeline
    from .output import Stopped

    if plan.judge:
        load_judge(plan.judge)
    results = Results(out, plan.describe(source, call), force)
    with progress() as bar:
        work = bar.add_task("loading", total=len(plan.conditions) * len(plan.clips))
        pipe = load_pipeline(source, dtype=place[0], device=place[1])

        def tick(name: str) -> None:
            bar.update(work, advance=0 if name else 1, description=name or "next clip")

        try:
            missing = measure(plan, pipe, call, results, tick)
        except KeyboardInterrupt:
            done = f"{len(results.lines)} clips are in {out}; the same command goes on with them"
            raise Stopped(f"stopped ({done})") from None
    figures = report(results, plan, pipe, missing)
    if as_json:
        print(to_json(figures))
    else:
        _show(figures, plan, out)


def _show(figures: dict[str, Any], plan: "Plan", out: Path) -> None:
    from rich.markup import escape

    from .bench_report import BUSY, HEADER, cells, of, shown
    from .bench_verdict import sentences

    header = [*HEADER, *(["changed"] if plan.judge else [])]
    for scheduler, steps in plan.conditions:
        found = of(figures["rows"], scheduler, steps)
        best = shown(found, figures["clock"])
        lines = [[escape(cell) for cell in cells(row)] for row in best]
        fewer = f" (peers: the first {plan.peer_clips})" if plan.peers else ""
        where = f"{scheduler or 'own scheduler'}, {steps} steps"
        title = f"{where}, clips: {len(plan.clips)}{fewer}, one thread"
        show(table(title, header, lines))
        if len(best) < len(found):
            show(
                f"{len(found) - len(best)} settings of peers that another of their family beats in "
                "speed and quality are in bench.csv alone."
            )
    for sentence in sentences(figures["verdicts"]):
        show(escape(sentence))
    if figures["waited"] > BUSY:
        show(
            f"[yellow]The machine was busy:[/] {figures['waited']:.0%} of the time went to other "
            "work, so all comparisons go by CPU time."
        )
    for name, why in figures["missing"].items():
        show(f"[yellow]Not measured:[/] {escape(name)}: {escape(why)}")
    show(f"Figures and plots: {escape(str(out))}")


def _tell_missing() -> None:
    """Before hours of work, not after."""
    from importlib.util import find_spec

    if find_spec("cache_dit") is None:
        typer.echo("cache-dit is left out: pip install 'diffcache[peers]' adds it", err=True)


def _own_prompts(folder: Path | None, file: Path | None) -> list[str]:
    """The prompts that a demo model comes with, where none are given."""
    import json

    path = None if folder is None or file is not None else folder / "demo.json"
    if path is None or not path.is_file():
        return []
    return list(json.loads(path.read_text(encoding="utf-8"))["prompts"])


def _schedulers(text: str | None) -> list[str]:
    """Names of schedulers; "" is the pipeline's own."""
    pieces = [""] if text is None else [piece.strip() for piece in text.split(",")]
    if text is not None and "" in pieces:
        raise ValueError(f"--scheduler must be like unipc or unipc,euler, got {text!r}")
    return list(dict.fromkeys(pieces))


def _counts(text: str) -> list[int]:
    pieces = [piece.strip() for piece in text.split(",")]
    if not all(piece.isdecimal() and int(piece) >= 2 for piece in pieces):
        raise ValueError(f"--steps must be like 50 or 20,50, each at least 2, got {text!r}")
    return [int(piece) for piece in dict.fromkeys(pieces)]

"""The work of `diffcache run`: everything checked first, then clip after clip."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from ..api import disabled, wrap
from ..api import report as report_of
from ..errors import DiffcacheWarning
from ..policy import Policy
from ..registry import get_policy
from .loading import local_folder, pipeline_class
from .media import publish, write_clip
from .output import Stopped
from .run_call import Call, Options
from .run_clip import Made, as_bytes, make_clip
from .run_files import Job, Place, make_folder, plan, refuse_existing
from .run_page import clip_section, run_page
from .run_result import entry, together
from .schedulers import check_scheduler, use_scheduler

WARM_UP = 2  # solver steps of a discarded call: what a process pays once is nobody's gain


@dataclass(frozen=True, kw_only=True)
class Output:
    """What is written, and where."""

    out: Path
    kind: str | None = None
    force: bool = False
    compare: bool = False
    report: Path | None = None

    def __post_init__(self) -> None:
        if self.report is not None and self.report.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"--report writes a page: {self.report} must end in .html")


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run that was checked as far as can be without weights."""

    source: str
    policy: Policy
    scheduler: str | None
    call: Call
    jobs: list[Job]
    force: bool
    report: Path | None


class Bars(Protocol):
    """Who is told of the progress."""

    def clip(self) -> None: ...

    def step(self, what: str, steps: Any) -> None: ...


def plan_task(
    source: str,
    *,
    policy: tuple[str, dict[str, Any]],
    scheduler: str | None,
    prompts: Sequence[str],
    seeds: Sequence[int],
    options: Options,
    output: Output,
) -> Task:
    """Names every file and makes their folders.

    Raises:
        ValueError: anything that can be known to go wrong.
    """
    name, settings = policy
    chosen = get_policy(name, **settings)
    if scheduler is not None:
        check_scheduler(scheduler)
    call = Call.plan(pipeline_class(source), options, local_folder(source))
    place = Place.choose(output.out, output.kind, call.video)
    jobs = plan(place, prompts, seeds, output.compare)
    paths = [path for job in jobs for path in (job.path, job.reference)] + [output.report]
    files = [path for path in paths if path is not None]
    refuse_existing(files, output.force)
    for folder in dict.fromkeys(path.parent for path in files):
        make_folder(folder)
    return Task(
        source=source,
        policy=chosen,
        scheduler=scheduler,
        call=call,
        jobs=jobs,
        force=output.force,
        report=output.report,
    )


def make_all(task: Task, pipe: Any, bars: Bars) -> dict[str, Any]:
    """Makes and writes every clip; what is finished stays when a later one fails.

    Returns:
        What --json prints.
    """
    if task.scheduler is not None:
        use_scheduler(pipe, task.scheduler)
    wrap(pipe, task.policy)
    entries: list[dict[str, Any]] = []
    sections: list[str] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DiffcacheWarning)  # the notes say who skipped nothing
            _warm_up(task, pipe)
            for job in task.jobs:
                figures, section = _make(task, job, pipe, bars)
                entries.append(figures)
                sections.append(section)
                bars.clip()
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}{_finished(task, entries)}") from error
    except KeyboardInterrupt:
        raise Stopped(f"stopped{_finished(task, entries)}") from None
    finally:
        found = together(entries, task.source, pipe, task.policy, task.call)
        if task.report is not None and entries:
            text = run_page(found, sections)
            publish(task.report, lambda path: _write(path, text), task.force)
    return found


def _warm_up(task: Task, pipe: Any) -> None:
    if task.jobs[0].reference is not None and "num_inference_steps" in task.call.takes:
        job = task.jobs[0]
        with disabled(pipe):
            make_clip(
                pipe, task.call, job.prompt, job.seed, lambda _: None, num_inference_steps=WARM_UP
            )


def _make(task: Task, job: Job, pipe: Any, bars: Bars) -> tuple[dict[str, Any], str]:
    """One clip, and before it the uncached one: its figures and its section of the page."""
    uncached = None
    if job.reference is not None:
        with disabled(pipe):
            uncached = _clip(task, job, pipe, partial(bars.step, "uncached:"))
    made = _clip(task, job, pipe, partial(bars.step, f"{task.policy.name}:"))
    report = report_of(pipe)
    figures = entry(job, task.call, made, uncached, report)
    for clip, path, key in ((uncached, job.reference, "path_uncached"), (made, job.path, "path")):
        if clip is not None and path is not None:
            written = write_clip(as_bytes(clip.frames), path, task.call.fps, task.force)
            figures[key] = str(written)
    section = ""
    if task.report is not None:
        section = clip_section(job, made, uncached, report, task.call.fps)
    return figures, section


def _clip(task: Task, job: Job, pipe: Any, progress: Any) -> Made:
    return make_clip(pipe, task.call, job.prompt, job.seed, progress)


def _finished(task: Task, entries: Sequence[dict[str, Any]]) -> str:
    if not entries:
        return ""
    folder = task.jobs[0].path.parent
    return f" ({len(entries)} of {len(task.jobs)} clips are finished, in {folder})"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")

"""Runs the demo model with and without caching, clip by clip, and compares.

Every clip is made by all methods in turn, the reference first, so that a machine that slows down
slows all of them. Computed forwards are counted at the last transformer block, not taken from our
report.
"""

import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..api import report, wrap
from ..denoiser import ATTRIBUTE
from ..errors import DiffcacheWarning
from ..records import Report


@dataclass(frozen=True)
class Method:
    """One row of the comparison; without a policy it is the plain pipeline."""

    name: str
    policy: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


REFERENCE = Method("reference")
FEWER_STEPS = Method("fewer steps")  # as many solver steps as FORECAST computed forwards
FORECAST = Method("forecast", "forecast")
# The settings bring each method to about the cost of `forecast` on the demo model at 50 steps;
# "published" is the method as its authors set it.
METHODS = (
    FORECAST,
    FEWER_STEPS,
    Method("hold", "hold", {"fraction": 0.4}),
    Method("first_block", "first_block", {"threshold": 0.06}),
    Method("first_block (published)", "first_block"),
    Method("taylorseer", "taylorseer", {"interval": 3}),
    Method("taylorseer (published)", "taylorseer"),
)


@dataclass(frozen=True)
class Task:
    """What the demo model is asked for; read from its demo.json."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    call: Mapping[str, Any]  # the pipeline's other arguments

    @classmethod
    def read(cls, folder: Path, prompts: int | None = None, steps: int | None = None) -> "Task":
        """The first `prompts` of them, with `steps` solver steps.

        Raises:
            ValueError: more prompts asked for than the model comes with.
        """
        known = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
        available = len(known["prompts"])
        if prompts is not None and not 1 <= prompts <= available:
            raise ValueError(f"--prompts must be between 1 and {available}, got {prompts}")
        chosen = tuple(known["prompts"][:prompts])
        seeds = tuple(known["seeds"][i % len(known["seeds"])] for i in range(len(chosen)))
        names = ("guidance_scale", "height", "width", "num_frames", "max_sequence_length")
        call = {name: known[name] for name in names if name in known}
        return cls(chosen, seeds, steps or known["num_inference_steps"], call)


@dataclass(frozen=True)
class Clip:
    """One clip of one method.

    Attributes:
        frames: [F, H, W, 3] in [0, 1].
        seconds: of the denoising loop, from the first denoiser call to the last solver step.
        seconds_cpu: the same in CPU time, which a busy machine does not stretch.
        seconds_total: of the whole pipeline call.
        computed: full denoiser forwards per branch, counted at the last block; the first clip of a
            stack site has two more in all, in which the blocks are observed and checked.
    """

    frames: np.ndarray[Any, Any]
    seconds: float
    seconds_cpu: float
    seconds_total: float
    steps: int
    computed: float
    report: Report | None


def run_all(
    pipe: Any, task: Task, tick: Callable[[str], None] = lambda name: None
) -> dict[str, list[Clip]]:
    """Every clip by every method: {method name: clips in the order of the prompts}."""
    pipelines = {method.name: pipeline_for(method, pipe) for method in (REFERENCE, *METHODS)}
    clips: dict[str, list[Clip]] = {name: [] for name in pipelines}
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DiffcacheWarning)  # the table shows who skipped nothing
        run_clip(pipe, task, 0, steps=2)  # warm-up, discarded
        for index in range(len(task.prompts)):
            for name, own in pipelines.items():
                steps = task.steps
                if name == FEWER_STEPS.name:
                    steps = max(1, round(clips[FORECAST.name][index].computed))
                clips[name].append(run_clip(own, task, index, steps))
                tick(name)
    return clips


def pipeline_for(method: Method, pipe: Any) -> Any:
    """A pipeline with a transformer and a scheduler of its own, wrapped where the method caches.

    What a method learns once (the order of the blocks) is then paid once, as in a user's program.
    """
    copies = {name: deepcopy(getattr(pipe, name)) for name in ("transformer", "scheduler")}
    own = type(pipe)(**{**pipe.components, **copies})
    own.set_progress_bar_config(disable=True)
    return own if method.policy is None else wrap(own, method.policy, **method.settings)


def run_clip(pipe: Any, task: Task, index: int, steps: int) -> Clip:
    """One clip of a pipeline, with the report of a wrapped one."""
    with watch(pipe.transformer) as loop:
        start = time.perf_counter()
        frames = pipe(
            task.prompts[index],
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(task.seeds[index]),
            output_type="np",
            callback_on_step_end=loop.step_ended,
            **task.call,
        ).frames[0]
        total = time.perf_counter() - start
    computed = loop.computed / (2 if task.call.get("guidance_scale", 5.0) > 1 else 1)
    made = report(pipe) if is_wrapped(pipe) else None
    return Clip(frames, loop.seconds, loop.seconds_cpu, total, steps, computed, made)


def is_wrapped(pipe: Any) -> bool:
    return ATTRIBUTE in pipe.transformer.__dict__


class Loop:
    """Times the denoising loop and counts the forwards that reach the last block."""

    def __init__(self) -> None:
        self.started: tuple[float, float] | None = None
        self.seconds = self.seconds_cpu = 0.0
        self.computed = 0

    def denoiser_called(self, *_: Any) -> None:
        if self.started is None:
            self.started = time.perf_counter(), time.thread_time()

    def last_block_called(self, *_: Any) -> None:
        self.computed += 1

    def step_ended(
        self, _pipe: Any, _step: int, _timestep: Any, kept: dict[str, Any]
    ) -> dict[str, Any]:
        wall, cpu = self.started or (0.0, 0.0)
        self.seconds = time.perf_counter() - wall
        self.seconds_cpu = time.thread_time() - cpu
        return kept


@contextmanager
def watch(transformer: torch.nn.Module) -> Iterator[Loop]:
    """A `Loop` that listens to this transformer for the length of one run."""
    loop = Loop()
    handles = (
        transformer.register_forward_pre_hook(loop.denoiser_called),
        transformer.blocks[-1].register_forward_pre_hook(loop.last_block_called),  # type: ignore
    )
    try:
        yield loop
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch: the steadiest timing on a shared machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

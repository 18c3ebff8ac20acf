"""Makes one clip: frames, seconds, and what was computed and reused, step by step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..denoiser import ATTRIBUTE
from .run_call import Call

Array = np.ndarray[Any, Any]
Progress = Callable[["Steps"], None]


@dataclass(frozen=True, kw_only=True)
class Made:
    """One clip of one pipeline call.

    Attributes:
        frames: [F, H, W, 3], uint8 or float in [0, 1]; an image is one frame.
        seconds: of the denoising loop, from the first denoiser call to the last solver step.
        seconds_total: of the whole call.
    """

    frames: Array
    seconds: float
    seconds_total: float


def make_clip(
    pipe: Any, call: Call, prompt: str, seed: int, progress: Progress, **more: Any
) -> Made:
    """One call of the pipeline; `more` replaces arguments of the call.

    Raises:
        ValueError: the pipeline refuses its arguments or runs out of memory, or what it returns is
            neither frames nor images.
    """
    arguments = {**call.arguments, **more}
    steps = Steps(pipe, progress)
    if "callback_on_step_end" in call.takes:
        arguments["callback_on_step_end"] = steps.step_ended
    with steps.watching():
        start = time.perf_counter()
        try:
            output = pipe(prompt=prompt, generator=torch.Generator().manual_seed(seed), **arguments)
        except ValueError as error:
            raise ValueError(f"{type(pipe).__name__} refuses: {error}") from error
        except (MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            raise ValueError(
                "out of memory: ask for fewer --frames or a smaller size, or try --dtype bfloat16 "
                "or --device offload"
            ) from error
        _synchronise()
        total = time.perf_counter() - start
    return Made(frames=frames_of(output), seconds=steps.seconds, seconds_total=total)


def frames_of(output: Any) -> Array:
    """[F, H, W, 3] of the first clip (or image) that a pipeline returned.

    Raises:
        ValueError: there is none, or it is no array and no list of images.
    """
    found = getattr(output, "frames", None)
    video = found is not None
    if not video:
        found = getattr(output, "images", None)
    if found is None or len(found) == 0:
        raise ValueError(f"{type(output).__name__} holds neither frames nor images")
    first = found[0] if video else found[:1]
    frames = np.stack([np.asarray(frame) for frame in first])
    if frames.ndim == 3:  # images without a colour axis
        frames = frames[..., None]
    if frames.ndim != 4 or frames.shape[-1] not in (1, 3, 4):
        raise ValueError(f"frames of shape {frames.shape} cannot be written: [F, H, W, 3] can")
    return np.repeat(frames, 3, axis=-1) if frames.shape[-1] == 1 else frames[..., :3]


def as_bytes(frames: Array) -> Array:
    """uint8 of uint8 or of [0, 1]; what is not finite becomes black."""
    if frames.dtype == np.uint8:
        return frames
    return (np.nan_to_num(frames, posinf=0.0, neginf=0.0).clip(0, 1) * 255).round().astype(np.uint8)


def _out_of_memory(error: Exception) -> bool:
    named = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return named or "allocate memory" in str(error)  # what torch says on a CPU


class Steps:
    """Times the denoising loop and counts what its steps computed and reused.

    Attributes:
        done, total: solver steps; both are 0 before the first has ended.
        computed, reused: steps in which no call, or some call, of a denoiser reused something.
        states: of the wrapped denoisers; empty within `diffcache.disabled`.
    """

    def __init__(self, pipe: Any, progress: Progress) -> None:
        from ..pipelines.denoisers import denoisers

        self.progress = progress
        self.denoisers = list(denoisers(pipe).values())
        self.done = self.total = self.computed = self.reused = 0
        self.started: float | None = None
        self.ended = 0.0
        states = [module.__dict__.get(ATTRIBUTE) for module in self.denoisers]
        self.states = [state for state in states if state is not None and not state.paused]
        self._seen = [(state.recorder.rows, len(state.recorder.rows)) for state in self.states]

    @property
    def seconds(self) -> float:
        return self.ended - self.started if self.started is not None else 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        hooks = [m.register_forward_pre_hook(self._called) for m in self.denoisers]
        hooks += [m.register_forward_hook(self._returned) for m in self.denoisers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def step_ended(self, pipe: Any, _step: int, _time: Any, kept: dict[str, Any]) -> dict[str, Any]:
        _synchronise()
        self.ended = time.perf_counter()
        self.done += 1
        timesteps = getattr(getattr(pipe, "scheduler", None), "timesteps", None)
        self.total = max(self.done, 0 if timesteps is None else len(timesteps))
        decisions = set(self._new_decisions())
        self.reused += "reuse" in decisions
        self.computed += bool(decisions) and "reuse" not in decisions
        self.progress(self)
        return kept

    def _called(self, *_: Any) -> None:
        if self.started is None:
            _synchronise()
            self.started = time.perf_counter()

    def _returned(self, *_: Any) -> None:
        if not self.done:  # a pipeline without callback: its loop ends with the last of these
            _synchronise()
        self.ended = time.perf_counter()

    def _new_decisions(self) -> Iterator[str]:
        for index, state in enumerate(self.states):
            rows, (known, count) = state.recorder.rows, self._seen[index]
            # A new run begins a new list.
            yield from (row.decision for row in rows[count if rows is known else 0 :])
            self._seen[index] = rows, len(rows)


def _synchronise() -> None:
    """Waits for the accelerator, whose work is queued, so that times are those of the work."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()

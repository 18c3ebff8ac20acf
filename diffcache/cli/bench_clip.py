"""Makes one clip by one method of the bench, on a pipeline that is this method's own."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from ..api import report, wrap
from ..blocks import find_block_lists
from .bench_methods import Method
from .bench_prompt import Prompts
from .run_call import Call
from .run_clip import frames_of

Array = np.ndarray[Any, Any]
WARM_UP = 8  # solver steps of a method's first call, which is discarded


class Bench:
    """One pipeline for each method: own modules and scheduler, but the same weights.

    What a method learns once (the order of the blocks, a calibration) is paid once, as in a user's
    program, and no method can disturb another.
    """

    def __init__(self, pipe: Any, call: Call, steps: int) -> None:
        self.pipe, self.arguments, self.steps = pipe, call.arguments, steps
        self.callback = "callback_on_step_end" in call.takes
        self.prompts = Prompts(pipe, call.arguments)
        self.own: dict[str, Any] = {}

    def clip(self, method: Method, prompt: str, seed: int) -> tuple[Array, dict[str, Any]]:
        """Frames [F, H, W, 3], and the figures of one clip.

        Figures: seconds and seconds_cpu of the denoising loop (first denoiser call to last solver
        step), seconds_total of the call, work (how many full forwards the blocks' executions amount
        to), and for ours what the report counts: computed forwards per branch.
        """
        if method.key not in self.own:
            self.own[method.key] = self._pipeline(method, prompt, seed)
        pipe = self.own[method.key]
        frames, figures = self._timed(pipe, method, prompt, seed, method.steps or self.steps)
        if method.policy is not None:
            figures["reported"] = report(pipe).summary["computed"]
        return frames, figures

    def _pipeline(self, method: Method, prompt: str, seed: int) -> Any:
        """The method's pipeline, calibrated if it needs that, and warm."""
        pipe = separate(self.pipe)
        if method.policy is not None:
            wrap(pipe, method.policy)
        prepare = getattr(method.peer, "prepare", None)
        if prepare is not None:
            prepare(pipe, lambda: self._call(pipe, prompt, seed, num_inference_steps=self.steps))
        self._timed(pipe, method, prompt, seed, min(WARM_UP, method.steps or self.steps))
        return pipe

    def _timed(
        self, pipe: Any, method: Method, prompt: str, seed: int, steps: int
    ) -> tuple[Array, dict[str, Any]]:
        cache = nullcontext() if method.peer is None else method.peer.apply(pipe)
        with cache, Loop.watching(pipe) as loop:
            more = {"callback_on_step_end": loop.step_ended} if self.callback else {}
            start = time.perf_counter()
            output = self._call(pipe, prompt, seed, num_inference_steps=steps, **more)
            total = time.perf_counter() - start
        return frames_of(output), {
            "seconds": loop.seconds,
            "seconds_cpu": loop.seconds_cpu,
            "seconds_total": total,
            "work": loop.work,
        }

    def _call(self, pipe: Any, prompt: str, seed: int, **more: Any) -> Any:
        generator = torch.Generator().manual_seed(seed)
        given = self.prompts.given(prompt)
        return pipe(**given, generator=generator, **{**self.arguments, **more})


class Loop:
    """Times a denoising loop; counts how much of the blocks really ran."""

    def __init__(self) -> None:
        self.started: tuple[float, float] | None = None
        self.seconds = self.seconds_cpu = self.work = 0.0
        self.steps = 0

    @classmethod
    @contextmanager
    def watching(cls, pipe: Any) -> Iterator[Loop]:
        from ..pipelines.denoisers import denoisers

        loop, hooks = cls(), []
        for denoiser in denoisers(pipe).values():
            hooks.append(denoiser.register_forward_pre_hook(loop._called))
            hooks.append(denoiser.register_forward_hook(loop._returned))
            for module, share in workers(denoiser):
                hooks.append(module.register_forward_pre_hook(loop._worker(share)))
        try:
            yield loop
        finally:
            for hook in hooks:
                hook.remove()

    def step_ended(self, _pipe: Any, _step: int, _time: Any, kept: dict[str, Any]) -> Any:
        self.steps += 1
        self._read_clocks()
        return kept

    def _called(self, *_: Any) -> None:
        if self.started is None:
            _synchronise()
            self.started = time.perf_counter(), time.thread_time()

    def _returned(self, *_: Any) -> None:
        if not self.steps:  # a pipeline without callback: its loop ends with the last of these
            self._read_clocks()

    def _read_clocks(self) -> None:
        _synchronise()
        wall, cpu = self.started or (0.0, 0.0)
        self.seconds, self.seconds_cpu = time.perf_counter() - wall, time.thread_time() - cpu

    def _worker(self, share: float) -> Any:
        def worked(*_: Any) -> None:
            self.work += share

        return worked


def workers(denoiser: nn.Module) -> list[tuple[nn.Module, float]]:
    """Modules that run only where a part of a block is computed, each with its share of a forward.

    A block itself, or its attention, may be called by a peer's hook that then skips the work, so
    the first linear layer within each part (attention, feed-forward) stands for it. A part counts
    by its linear weights. Without blocks it is the denoiser that counts.
    """
    parts = [
        (linears[0], float(sum(linear.weight.numel() for linear in linears)))
        for found in find_block_lists(denoiser)
        for block in found.blocks.children()
        for part in block.children()
        if (linears := [m for m in part.modules() if isinstance(m, nn.Linear)])
    ]
    whole = sum(weight for _, weight in parts)
    return [(module, weight / whole) for module, weight in parts] or [(denoiser, 1.0)]


def separate(pipe: Any) -> Any:
    """A pipeline with its own denoisers and scheduler that shares all weights with `pipe`."""
    from ..pipelines.denoisers import denoisers

    own = copy.copy(pipe)
    for name, module in denoisers(pipe).items():
        tensors = [*module.parameters(), *module.buffers()]
        own.__dict__[name] = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    own.__dict__["scheduler"] = copy.deepcopy(pipe.scheduler)
    return own


def _synchronise() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()

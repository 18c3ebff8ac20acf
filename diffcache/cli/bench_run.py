"""The loop of the bench: every clip by all methods in turn, so that a slow moment hits them all."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import __version__, metrics
from ..errors import DiffcacheWarning
from .bench_clip import Array, Bench
from .bench_judge import Judge, load_judge
from .bench_methods import REFERENCE, Method, baselines
from .bench_store import Results
from .demo_run import one_thread
from .run_call import Call
from .schedulers import use_scheduler

Tick = Callable[[str], None]
TIMES = ("seconds", "seconds_cpu", "seconds_total", "work")
PLAIN = Method(family=REFERENCE, kind="reference")
RETIMED = 20  # methods after which the reference is made again: how busy a machine is changes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        conditions: (scheduler name or "", solver steps).
        clips: (prompt, seed), in the order in which they are made.
        peers: measure them too, on the first `peer_clips` clips.
        judge: reads attributes off a clip, as "module:function", or None.
    """

    conditions: tuple[tuple[str, int], ...]
    clips: tuple[tuple[str, int], ...]
    methods: tuple[Method, ...]
    peers: bool = False
    peer_clips: int = 0
    judge: str | None = None

    def describe(self, source: str, call: Call) -> dict[str, Any]:
        """What must be equal for a run to go on with older results."""
        return {
            "source": source,
            "arguments": call.arguments,
            "clips": self.clips,
            "conditions": self.conditions,
            "policies": {m.key: m.policy.to_dict() for m in self.methods if m.policy},
            "peers": self.peers,
            "peer_clips": self.peer_clips,
            "judge": self.judge,
            "diffcache": __version__,
        }


def measure(plan: Plan, pipe: Any, call: Call, results: Results, tick: Tick) -> dict[str, str]:
    """Makes all clips that `results` lacks; says which peers do not run here, and why."""
    missing: dict[str, str] = {}
    judge = load_judge(plan.judge) if plan.judge else None
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DiffcacheWarning)  # the table shows who skipped nothing
        own = pipe.scheduler
        for scheduler, steps in plan.conditions:
            pipe.scheduler = own
            if scheduler:
                use_scheduler(pipe, scheduler)
            methods, refused = methods_of(plan, pipe, steps)
            missing |= refused
            condition = Condition(Bench(pipe, call, steps), results, scheduler, judge, tick)
            for index, (prompt, seed) in enumerate(plan.clips):
                asked = [m for m in methods if m.kind != "peer" or index < plan.peer_clips]
                random.Random(index).shuffle(asked)
                condition.make(asked, prompt, seed)
                tick("")
            missing |= results.failed(scheduler, steps)
    return missing


def methods_of(plan: Plan, pipe: Any, steps: int) -> tuple[list[Method], dict[str, str]]:
    """All methods of one condition, and why some peers do not run on this pipeline."""
    own = {method.key: method for method in (*plan.methods, *baselines(steps))}
    ours = list(own.values())
    if not plan.peers:
        return ours, {}
    from ..pipelines.peers import peers

    found, refused = peers(pipe, steps)
    theirs = [Method(family=p.family, kind="peer", setting=p.setting, peer=p) for p in found]
    return [*ours, *theirs], refused


class Condition:
    """One scheduler and number of steps: makes clips and adds them to the results."""

    def __init__(
        self, bench: Bench, results: Results, scheduler: str, judge: Judge | None, tick: Tick
    ) -> None:
        self.bench, self.results, self.judge, self.tick = bench, results, judge, tick
        self.where: dict[str, Any] = {"scheduler": scheduler, "steps": bench.steps}

    def make(self, methods: list[Method], prompt: str, seed: int) -> None:
        """One clip by the reference, then by all methods that lack it.

        A method is held against the latest reference, whose time is at most RETIMED clips old.
        """
        what = {**self.where, "prompt": prompt, "seed": seed}
        failed = self.results.failed(**self.where)
        lacking = [
            m for m in methods if m.key not in failed and not self.results.has(**what, method=m.key)
        ]
        if not lacking:
            return
        truth, reference = self.bench.clip(PLAIN, prompt, seed)
        read = self.judge(truth, prompt) if self.judge else None
        if not self.results.has(**what, method=REFERENCE):
            self.results.add(**what, method=REFERENCE, **reference, attributes=read)
        for count, method in enumerate(lacking, 1):
            self.tick(method.key)
            if count % RETIMED == 0:
                _, reference = self.bench.clip(PLAIN, prompt, seed)
            try:
                frames, figures = self.bench.clip(method, prompt, seed)
            except Exception as error:
                if method.kind != "peer":  # ours and the baselines must run
                    raise
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
                self.results.add(**self.where, method=method.key, failed=why)
                continue
            figures |= {f"reference_{name}": reference[name] for name in TIMES}
            figures |= compared(frames, truth)
            if self.judge:
                figures["attributes"] = self.judge(frames, prompt)
                figures["changed"] = figures["attributes"] != read
            self.results.add(**what, method=method.key, **method.named(), **figures)


def compared(frames: Array, truth: Array) -> dict[str, float | str]:
    """PSNR and SSIM against the reference; text where not finite, which JSON cannot hold."""
    a, b = torch.from_numpy(frames), torch.from_numpy(truth)
    found = {"psnr": metrics.psnr(a, b), "ssim": metrics.ssim(a, b)}
    return {name: v if math.isfinite(v) else str(v) for name, v in found.items()}

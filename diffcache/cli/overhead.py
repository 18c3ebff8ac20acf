"""`diffcache overhead`: our own time in each call, the model's forward stubbed out."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .output import JsonFlag, progress, show, table, to_json

if TYPE_CHECKING:
    from ..policy import Policy

STEPS, BLOCKS = 50, 12
LIMITS = {"model": 200.0, "stack": 200.0, "block": 60.0}  # microseconds


@dataclass(frozen=True)
class Timing:
    """Medians in microseconds of a wrapped call of the stub (at the block site: for each block)."""

    policy: str
    site: str
    per: str
    microseconds: float
    computed: float
    reused: float
    stub: float
    limit: float
    calls: int


def overhead(
    calls: Annotated[int, typer.Option(min=2 * STEPS, help="Calls for each policy.")] = 2000,
    as_json: JsonFlag = False,
) -> None:
    """Measures the time that diffcache itself takes in each call of a denoiser.

    The model's forward is a stub; latents and hidden states have the demo model's sizes; one
    thread, float32. The stub's own time is included in the medians and shown beside them.
    """
    from .demo_run import one_thread

    policies = _policies()
    with one_thread(), progress() as bar:
        work = bar.add_task("measuring", total=len(policies) + 1)
        stub = median(taken for taken, _ in _measure(None, calls))
        bar.update(work, advance=1)
        timings = []
        for policy in policies:
            timings.append(_timing(policy, _measure(policy, calls), stub))
            bar.update(work, advance=1, description=policy.name)
    if as_json:
        print(to_json([asdict(timing) for timing in timings]))
        return
    rows = [
        [t.policy, t.site, t.per]
        + [f"{v:.0f}" for v in (t.microseconds, t.computed, t.reused, t.stub, t.limit)]
        for t in timings
    ]
    header = ["policy", "site", "per", "median us", "computed", "reused", "stub alone", "limit"]
    show(table(f"Our own time, {calls} calls, one thread", header, rows, words=3))


def _policies() -> list["Policy"]:
    """One for each site, and a probe at every block."""
    from ..policy import Policy
    from ..registry import get_policy

    block = Policy(
        name="a probe at each block",
        site={"kind": "block", "anchor": 0},  # type: ignore[arg-type]
        probe="site_input",  # type: ignore[arg-type]
        metric="relative_l1",  # type: ignore[arg-type]
        gate="threshold",  # type: ignore[arg-type]
        predictor="hold",  # type: ignore[arg-type]
    )
    named = ("forecast", "easycache", "first_block", "taylorseer")
    return [*(get_policy(name) for name in named), block]


def _timing(policy: "Policy", calls: list[tuple[float, bool]], stub: float) -> Timing:
    site = policy.site.kind
    parts = BLOCKS if site == "block" else 1

    def middle(values: list[float]) -> float:
        return median(values) / parts if values else float("nan")

    return Timing(
        policy=policy.name,
        site=site,
        per="block" if site == "block" else "call",
        microseconds=middle([taken for taken, _ in calls]),
        computed=middle([taken for taken, reused in calls if not reused]),
        reused=middle([taken for taken, reused in calls if reused]),
        stub=stub / parts,
        limit=LIMITS[site],
        calls=len(calls),
    )


def _measure(policy: "Policy | None", calls: int) -> list[tuple[float, bool]]:
    """(microseconds, whether something was reused) of calls, in runs of 50 steps, two branches."""
    import torch

    from ..api import wrap

    pipe = _stub_pipeline()
    if policy is not None:
        wrap(pipe, policy)
    measured: list[tuple[float, bool]] = []
    generator = torch.Generator().manual_seed(0)
    noise, drift = (torch.randn(1, 16, 5, 8, 8, generator=generator) for _ in range(2))
    text = [torch.randn(1, 512, 64, generator=generator) for _ in range(2)]
    with torch.no_grad():
        while len(measured) < calls:
            pipe.scheduler.set_timesteps(STEPS)
            taken = _run(pipe, noise, 0.01 * drift, text)
            reused = [False] * len(taken) if policy is None else _reused(pipe)
            measured += zip(taken, reused, strict=True)
    return measured[:calls]


def _run(pipe: Any, noise: Any, drift: Any, text: list[Any]) -> list[float]:
    """Microseconds of each call of one denoising loop."""
    taken = []
    for step, timestep in enumerate(pipe.scheduler.timesteps):
        latents, times = noise + step * drift, timestep.expand(1)
        for branch, condition in zip(("cond", "uncond"), text, strict=True):
            with pipe.transformer.cache_context(branch):
                start = time.perf_counter_ns()
                pipe.transformer(latents, times, condition)
                taken.append((time.perf_counter_ns() - start) / 1e3)
    return taken


def _reused(pipe: Any) -> list[bool]:
    """For each call of the last run whether anything was reused in it."""
    from ..api import report

    calls: dict[tuple[int, str], bool] = {}
    for row in report(pipe).rows:
        key = (row.step, row.branch)
        calls[key] = calls.get(key, False) or row.decision == "reuse"
    return list(calls.values())


def _stub_pipeline() -> Any:
    """A pipeline in all that is asked of one; its transformer's blocks hand out ready tensors."""
    import torch
    from torch import Tensor, nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()
            self.outputs = [torch.randn(1, 80, 128) for _ in range(2)]

        def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> Tensor:
            return self.outputs[hidden_states is self.outputs[0]]

    class Transformer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
            self.entry, self.output = torch.randn(1, 80, 128), torch.randn(1, 16, 5, 8, 8)

        def forward(
            self, hidden_states: Tensor, timestep: Tensor, encoder_hidden_states: Tensor
        ) -> Tensor:
            tokens = self.entry
            for block in self.blocks:
                tokens = block(tokens, encoder_hidden_states)
            return self.output

        @contextmanager
        def cache_context(self, name: str) -> Iterator[None]:
            yield

    class Scheduler:
        def set_timesteps(self, steps: int) -> None:
            self.sigmas = torch.linspace(1, 0, steps + 1)
            self.timesteps = 1000 * self.sigmas[:-1]

    class Pipeline:
        def __init__(self) -> None:
            self.transformer, self.scheduler = Transformer(), Scheduler()
            self.components = {"transformer": self.transformer, "scheduler": self.scheduler}

    return Pipeline()

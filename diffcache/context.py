"""Where in the denoising loop a call is, and when a new trajectory begins."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .signature import Call
from .timesteps import Schedule, Serves

PassKind = Literal["denoise", "kv_write", "prefill"]
# Without a schedule, a leap this many times the last one is taken for a new run.
LEAP = 4.0


@dataclass(slots=True)
class CallContext:
    """What is known about one call of the denoiser.

    Attributes:
        branch: "cond", "uncond" or another name.
        chunk: index given by `diffcache.chunk`, or None.
        step: distinct times that this denoiser served before in this trajectory.
        branch_step: the same, of this branch alone.
        timestep: as the model is given it.
        sigma: the noise level where the scheduler or the pipeline tells it, else None.
        time: what predictors interpolate over: sigma of flow matching, else the timestep; the
            chunk index on the chunk axis.
        pass_kind: "denoise", "kv_write" or "prefill".
        num_steps: steps of this trajectory, None where no scheduler tells.
        times: `time` of all of them in order, None where no scheduler tells.
        new: why this call begins a new trajectory, or None.
    """

    branch: str
    chunk: int | None
    step: int
    branch_step: int
    timestep: float
    sigma: float | None
    time: float
    pass_kind: PassKind
    num_steps: int | None
    new: str | None
    times: tuple[float, ...] | None = None

    @property
    def steps_left(self) -> int | None:
        return None if self.num_steps is None else self.num_steps - 1 - self.step


@dataclass(slots=True)
class Branch:
    """What one branch was served in a trajectory."""

    conditioning: tuple[Any, ...]
    timestep: float | None = None
    visits: int = 0
    steps: int = 0
    index: int = -1

    def visit(self, timestep: float) -> None:
        if timestep == self.timestep:
            self.visits += 1
            return
        self.timestep, self.visits = timestep, 1
        self.steps += 1


class Trajectory:
    """One pass of the solver from noise to sample, as seen by one denoiser."""

    def __init__(
        self, call: Call, schedule: Schedule | None, chunk: int | None, flow: bool
    ) -> None:
        self.schedule = schedule
        self.chunk = chunk
        self.flow = flow
        self.signature = latent_signature(call.inputs)
        self.times: list[float] = []
        self.index = -1
        self.plan: tuple[float, ...] | None = None
        self.branches: dict[str, Branch] = {}

    def step_of(self, timestep: float) -> int:
        """Counts distinct times in order."""
        if not self.times or self.times[-1] != timestep:
            self.times.append(timestep)
        return len(self.times) - 1

    def direction_reason(self, branch: Branch | None, timestep: float) -> str | None:
        """Without a scheduler in sight: why `timestep` cannot go on with this trajectory."""
        times = self.times
        if branch is not None and branch.timestep == timestep:
            # Two-stage solvers (Heun) visit each time but the first twice.
            again = timestep == times[0] or branch.visits > 1
            return "timestep came back" if again else None
        moved = timestep - times[-1]
        if not moved or len(times) < 2:
            return None
        if moved * (times[1] - times[0]) < 0:
            return "timestep went back"
        return "timestep leapt" if abs(moved) > LEAP * abs(times[-1] - times[-2]) else None


class Clock:
    """Builds the context of each call; remembers one trajectory."""

    def __init__(self) -> None:
        # Weak references, each with what tells which timesteps this denoiser serves there.
        self.pipelines: list[tuple[Callable[[], Any], Serves | None]] = []
        self.named: tuple[str, dict[str, Any]] | None = None
        self.chunk: int | None = None
        self.pass_kind: PassKind = "denoise"
        self.trajectory: Trajectory | None = None
        # `timesteps` that say nothing: not armed since wrap, or found not to be the loop's own.
        self.stale: list[Any] = []
        self._branches = BranchNames()

    def watch(self, pipeline: Any, serves: Serves | None = None) -> None:
        """Reads the scheduler of this pipeline from now on (weakly held)."""
        others = [(ref, old) for ref, old in self.pipelines if ref() not in (None, pipeline)]
        self.pipelines = [*others, (weakref.ref(pipeline), serves)]
        self._distrust(getattr(getattr(pipeline, "scheduler", None), "timesteps", None))

    def reset(self) -> None:
        """The next call begins a new trajectory."""
        self.trajectory = None

    def begin(self, call: Call) -> CallContext | None:
        """The context of `call`; None where its time is not one known number."""
        if call.timestep is None:
            self.trajectory = None
            return None
        digests = (self._branches.digest(call.conditioning), call.options)
        name = self.named[0] if self.named else self._branches.name(digests)
        schedule = self._schedule(call.timestep)
        reason = self._new_trajectory(call, call.timestep, name, schedule, digests)
        if reason is not None:
            flow = schedule.is_flow if schedule else 0 <= self._named("sigma", 2.0) <= 1
            self.trajectory = Trajectory(call, schedule, self.chunk, flow)
        trajectory = self.trajectory
        assert trajectory is not None
        branch = trajectory.branches.setdefault(name, Branch(digests))
        return self._context(call.timestep, name, branch, trajectory, reason)

    def last_served(self, context: CallContext) -> bool:
        """Whether the schedule ends with this call for its branch."""
        trajectory = self.trajectory
        if trajectory is None or trajectory.schedule is None:
            return False
        return trajectory.branches[context.branch].index == trajectory.schedule.last

    def _context(
        self, timestep: float, name: str, branch: Branch, trajectory: Trajectory, reason: str | None
    ) -> CallContext | None:
        sigma, num_steps = self._named("sigma", None), self._named("num_inference_steps", None)
        schedule = trajectory.schedule
        if schedule is not None:
            index = schedule.find(timestep, branch.index + 1) or 0
            if trajectory.plan is None:
                trajectory.plan = schedule.times(index)
            elif schedule.leap(trajectory.index, index):
                # The loop leaves out steps of this schedule, so it runs another one.
                self._distrust(schedule.token)
            branch.index = index
            trajectory.index = max(trajectory.index, index)
            num_steps = len(trajectory.plan)
            sigma = schedule.sigmas[index] if schedule.sigmas else sigma
        if trajectory.flow and sigma is None:
            self.trajectory = None
            return None
        branch.visit(timestep)
        return CallContext(
            branch=name,
            chunk=self.chunk,
            step=trajectory.step_of(timestep),
            branch_step=branch.steps - 1,
            timestep=timestep,
            sigma=sigma,
            time=sigma if trajectory.flow and sigma is not None else timestep,
            pass_kind=self.pass_kind,
            num_steps=num_steps,
            new=reason,
            times=trajectory.plan,
        )

    def _new_trajectory(
        self,
        call: Call,
        timestep: float,
        name: str,
        schedule: Schedule | None,
        digests: tuple[Any, ...],
    ) -> str | None:
        """Why `call` begins a new trajectory, or None if it goes on with the present one."""
        old = self.trajectory
        if old is None:
            return "first call"
        if schedule is not old.schedule:
            return "scheduler armed anew"
        if self.chunk != old.chunk:
            return "new chunk"
        if old.signature != latent_signature(call.inputs):
            return "shape, dtype or device changed"
        branch = old.branches.get(name)
        if branch is not None and branch.conditioning != digests:
            return "conditioning changed"
        if schedule is not None:
            found = schedule.find(timestep, branch.index + 1 if branch else 0)
            return "timestep came back" if found is None else None
        return old.direction_reason(branch, timestep)

    def _schedule(self, timestep: float) -> Schedule | None:
        """The schedule that this call belongs to: armed since wrap, and holding this timestep."""
        old = self.trajectory.schedule if self.trajectory else None
        for reference, serves in reversed(self.pipelines):
            scheduler = getattr(reference(), "scheduler", None)
            token = getattr(scheduler, "timesteps", None)
            if token is None or any(token is stale for stale in self.stale):
                continue
            same = old is not None and old.token is token
            schedule = old if old is not None and same else Schedule(scheduler, serves)
            if schedule.find(timestep, 0) is not None:
                return schedule
        return None

    def _named(self, key: str, default: Any) -> Any:
        return self.named[1].get(key, default) if self.named else default

    def _distrust(self, timesteps: Any) -> None:
        if timesteps is not None:
            self.stale = [*self.stale[-7:], timesteps]


class BranchNames:
    """Names branches by what they are conditioned on, never by counting calls."""

    MAX_BRANCHES = 16

    def __init__(self) -> None:
        self._digests: dict[int, tuple[weakref.ref[Tensor], int | None, str]] = {}
        self._names: dict[Any, str] = {}

    def digest(self, conditioning: Sequence[tuple[str, Tensor]]) -> tuple[Any, ...]:
        """Content digests by name; only tensors not seen before are read."""
        return tuple((name, self._of(tensor)) for name, tensor in conditioning)

    def name(self, key: tuple[Any, ...]) -> str:
        """ "branch 0" for the first conditioning, "branch 1" for the next other one, and so on."""
        if key not in self._names:
            if len(self._names) >= self.MAX_BRANCHES:
                self._names.clear()
            self._names[key] = f"branch {len(self._names)}"
        return self._names[key]

    def _of(self, tensor: Tensor) -> str:
        version = None if tensor.is_inference() else tensor._version
        known = self._digests.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        digest = content_digest(tensor)
        if len(self._digests) > 256:
            self._digests = {k: v for k, v in self._digests.items() if v[0]() is not None}
        self._digests[id(tensor)] = (weakref.ref(tensor), version, digest)
        return digest


def content_digest(tensor: Tensor) -> str:
    """Digest of shape, dtype and content; a meta tensor has no content."""
    head = f"{tuple(tensor.shape)}{tensor.dtype}{tensor.device}"
    if tensor.is_meta:
        return head
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return head + hashlib.blake2b(raw.tobytes(), digest_size=16).hexdigest()


def latent_signature(inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """What must not change within a trajectory."""
    return tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in inputs)

"""Where in the denoising loop a call is, and when a new trajectory begins."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from .branches import BranchNames
from .progress import Progress
from .signature import Call
from .timesteps import Schedule, Serves
from .trajectory import CAME_BACK, Branch, Trajectory, latent_signature

PassKind = Literal["denoise", "kv_write", "prefill"]


@dataclass(slots=True)
class CallContext:
    """What is known about one call of the denoiser.

    Attributes:
        branch: "cond", "uncond" or another name.
        chunk: index given by `diffcache.chunk`, else the one that the pipeline shows, or None.
        step: distinct times that this denoiser served before in this trajectory.
        branch_step: the same, of this branch alone.
        timestep: as the model is given it.
        sigma: the noise level where the scheduler or the pipeline tells it, else None.
        time: what predictors interpolate over: sigma of flow matching, else the timestep; the
            chunk index on the chunk axis.
        pass_kind: "denoise", "kv_write" or "prefill".
        num_steps: steps of this trajectory, None where no scheduler tells.
        width: how far sigma moves in this step, None where no flow-matching scheduler tells.
        new: why this call begins a new trajectory, or None.
        levels: noise levels of all steps of the flow-matching schedule, None where none tells.
        place: the index of this step in `levels`.
        solver: the scheduler's class name, None where no scheduler tells.
        ambiguous: this step or the one before had two passes that nothing tells apart.
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
    width: float | None = None
    levels: tuple[float, ...] | None = None
    place: int = 0
    solver: str | None = None
    ambiguous: bool = False

    @property
    def steps_left(self) -> int | None:
        return None if self.num_steps is None else self.num_steps - 1 - self.step


class Clock:
    """Builds the context of each call; remembers one trajectory."""

    def __init__(self) -> None:
        # Weak references, each with what tells which timesteps this denoiser serves there.
        self.pipelines: list[tuple[Callable[[], Any], Serves | None]] = []
        self.named: tuple[str, dict[str, Any]] | None = None
        self.chunk: int | None = None
        self.progress = Progress()
        self.pass_kind: PassKind = "denoise"
        self.trajectory: Trajectory | None = None
        # `timesteps` that say nothing: not armed since wrap, or found not to be the loop's own.
        self.stale: list[Any] = []
        self._armed: list[Schedule] = []  # oldest first
        self._branches = BranchNames()
        self._names_of: tuple[Any, ...] = ()  # the part in which they were given

    def watch(self, pipeline: Any, serves: Serves | None = None) -> None:
        """Reads the scheduler of this pipeline from now on (weakly held)."""
        others = [(ref, old) for ref, old in self.pipelines if ref() not in (None, pipeline)]
        self.pipelines = [*others, (weakref.ref(pipeline), serves)]
        self._distrust(getattr(getattr(pipeline, "scheduler", None), "timesteps", None))

    @property
    def chunk_now(self) -> int | None:
        """The chunk that a call belongs to; the user's word comes first."""
        return self.progress.chunk if self.chunk is None else self.chunk

    @property
    def _part(self) -> tuple[Any, ...]:
        """What a trajectory never goes beyond."""
        return self.chunk, self.progress.chunk, self.progress.run

    def reset(self) -> None:
        """The next call begins a new trajectory."""
        self.trajectory = None

    def begin(self, call: Call) -> CallContext | None:
        """The context of `call`; None where its time is not one known number."""
        if call.timestep is None:
            self.trajectory = None
            return None
        digests = (self._branches.digest(call.conditioning), call.options)
        if self._names_of != self._part:
            self._branches.begin()
            self._names_of = self._part
        name = self.named[0] if self.named else self._branches.name(digests)
        schedule = self._schedule(call.timestep, name)
        reason = self._new_trajectory(call, call.timestep, name, schedule, digests)
        if reason is not None:
            flow = schedule.is_flow if schedule else 0 <= self._named("sigma", 2.0) <= 1
            old = self.trajectory
            self.trajectory = Trajectory(call, schedule, self.chunk_now, flow, self._part)
            if old is not None and reason == CAME_BACK and old.repeats(name, call.timestep):
                self.trajectory.begun_by_repeat(old)
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
        schedule, width = trajectory.schedule, None
        if schedule is not None:
            index, trust = trajectory.advance(schedule, branch, timestep)
            if not trust:
                self._distrust(schedule.token)
            num_steps, width = trajectory.num_steps, schedule.width(index)
            sigma = schedule.sigmas[index] if schedule.sigmas else sigma
        if trajectory.flow and sigma is None:
            self.trajectory = None
            return None
        mark = timestep if schedule is None else schedule.ordinals[trajectory.index]
        branch.visit(mark, timestep)
        return CallContext(
            branch=name,
            chunk=self.chunk_now,
            step=trajectory.step_of(mark),
            branch_step=branch.steps - 1,
            timestep=timestep,
            sigma=sigma,
            time=sigma if trajectory.flow and sigma is not None else timestep,
            pass_kind=self.pass_kind,
            num_steps=num_steps,
            new=reason,
            width=width,
            levels=schedule.levels if schedule else None,
            place=int(mark) if schedule else 0,
            solver=schedule.solver if schedule else None,
            ambiguous=trajectory.ambiguous and branch.steps <= 2,
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
        if self.progress.run is not old.part[-1]:
            return "new run"
        if self._part != old.part:
            return "new chunk"
        if schedule is not old.schedule:
            return "scheduler armed anew"
        if old.signature != latent_signature(call.inputs):
            return "shape, dtype or device changed"
        branch = old.branches.get(name)
        if schedule is not None and old.place(schedule, branch, timestep) is None:
            return CAME_BACK
        reason = old.direction_reason(branch, timestep) if schedule is None else None
        # Time comes first: another prompt in a new video is a new run, not a change in this one.
        if reason is None and branch is not None and branch.conditioning != digests:
            return "conditioning changed"
        return reason

    def _schedule(self, timestep: float, name: str) -> Schedule | None:
        """The schedule that this call belongs to, if any that was armed since wrap.

        One not seen before comes first, then the present one as long as it goes on, then the
        others: pipelines that share a denoiser take turns.
        """
        fresh = self._read_schedulers()
        old = self.trajectory
        if old is not None and old.schedule in self._armed and not fresh:
            assert old.schedule is not None
            if old.place(old.schedule, old.branches.get(name), timestep) is not None:
                return old.schedule
        for schedule in reversed(self._armed):
            if schedule.place(timestep, 0, 0) is not None:
                return schedule
        return None

    def _read_schedulers(self) -> bool:
        """Brings `_armed` up to date; whether a scheduler has been armed since the last call."""
        current = []
        for reference, serves in self.pipelines:
            scheduler = getattr(reference(), "scheduler", None)
            token = getattr(scheduler, "timesteps", None)
            if token is not None and not any(token is stale for stale in self.stale):
                current.append((token, scheduler, serves))
        known = [s for s in self._armed if any(s.token is token for token, _, _ in current)]
        new = [
            Schedule(scheduler, serves)
            for token, scheduler, serves in current
            if not any(s.token is token for s in known)
        ]
        self._armed = known + new
        return bool(new)

    def _named(self, key: str, default: Any) -> Any:
        return self.named[1].get(key, default) if self.named else default

    def _distrust(self, timesteps: Any) -> None:
        if timesteps is not None:
            self.stale = [*self.stale[-7:], timesteps]

"""One pass of the solver from noise to sample, as one denoiser sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .signature import Call
from .timesteps import Form, Schedule

# Without a schedule, a leap this many times the last one is taken for a new run.
LEAP = 4.0
CAME_BACK = "timestep came back"


@dataclass(slots=True)
class Branch:
    """What one branch was served in a trajectory."""

    conditioning: tuple[Any, ...]
    mark: float | None = None
    timestep: float | None = None
    visits: int = 0
    steps: int = 0
    index: int = -1

    def visit(self, mark: float, timestep: float) -> None:
        """Counts calls at one step; a mark is a timestep, or its ordinal in a schedule."""
        self.timestep = timestep
        if mark == self.mark:
            self.visits += 1
            return
        self.mark, self.visits = mark, 1
        self.steps += 1


class Trajectory:
    """One pass of the solver from noise to sample, as seen by one denoiser."""

    def __init__(
        self,
        call: Call,
        schedule: Schedule | None,
        chunk: int | None,
        flow: bool,
        part: tuple[Any, ...] = (),
    ) -> None:
        self.schedule = schedule
        self.chunk = chunk
        self.part = part  # the chunk and the run that it lies in
        self.flow = flow
        self.signature = latent_signature(call.inputs)
        self.marks: list[float] = []
        self.index = -1
        self.form: Form | None = None
        self.exact = True
        self.num_steps: int | None = None
        self.branches: dict[str, Branch] = {}
        self.suspected = False  # it began with a time that its branch had just been served
        self.ambiguous = False  # and that was no new run

    def repeats(self, name: str, timestep: float) -> bool:
        """Whether the branch's latest call was at this time too: nothing tells the two apart."""
        branch = self.branches.get(name)
        single = self.schedule is not None and self.schedule.num_steps(0) < 2
        return branch is not None and branch.timestep == timestep and not single

    def begun_by_repeat(self, old: Trajectory) -> None:
        """Without a schedule the first time may be that of a new run, after one cancelled there."""
        self.suspected = True
        self.ambiguous = self.schedule is not None or old.suspected

    def step_of(self, mark: float) -> int:
        """Counts distinct steps in order."""
        if not self.marks or self.marks[-1] != mark:
            self.marks.append(mark)
        return len(self.marks) - 1

    def place(
        self, schedule: Schedule, branch: Branch | None, timestep: float
    ) -> tuple[int, Form] | None:
        """Where this branch's next call lies in the schedule, None if it does not go on there."""
        start = branch.index + 1 if branch is not None else 0
        return schedule.place(timestep, start, self.index, self.form, self.exact)

    def advance(self, schedule: Schedule, branch: Branch, timestep: float) -> tuple[int, bool]:
        """Moves on to `timestep`; its index, and whether the loop follows this schedule at all."""
        index, self.form = self.place(schedule, branch, timestep) or (0, self.form)
        self.exact = self.exact and schedule.timesteps[index] == timestep
        trust = True
        if self.num_steps is None:
            self.num_steps = schedule.num_steps(index)
        else:
            trust = schedule.ordinals[index] <= schedule.ordinals[self.index] + 1
        branch.index, self.index = index, max(self.index, index)
        return index, trust

    def direction_reason(self, branch: Branch | None, timestep: float) -> str | None:
        """Without a scheduler in sight: why `timestep` cannot go on with this trajectory."""
        times = self.marks
        if branch is not None and branch.mark == timestep:
            # Two-stage solvers (Heun) visit each time but the first twice.
            again = timestep == times[0] or branch.visits > 1 or self.suspected
            return CAME_BACK if again else None
        moved = timestep - times[-1]
        if not moved or len(times) < 2:
            return None
        if moved * (times[1] - times[0]) < 0:
            return "timestep went back"
        return "timestep leapt" if abs(moved) > LEAP * abs(times[-1] - times[-2]) else None


def latent_signature(inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """What must not change within a trajectory."""
    return tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in inputs)

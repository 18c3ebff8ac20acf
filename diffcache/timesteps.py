"""A scheduler's timesteps and noise levels, read once for each time that it is armed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

Serves = Callable[[float], bool]  # of two experts: whether this one is called at a timestep
Form = Callable[[float], float]

# What models are given for a timestep t: t, t / 1000 (Flux), 1 - t / 1000 (Lumina); the inverses.
FORMS: tuple[Form, ...] = (lambda t: t, lambda t: t * 1000, lambda t: (1 - t) * 1000)
# Some pipelines round t to bf16, before or after scaling it: twice 2^-8 at most.
ROUNDING = 2.0**-7


class Schedule:
    """A host copy of what a scheduler was armed with; `token` is its `timesteps` tensor itself.

    `ordinals` counts distinct times: two-stage solvers name each time twice. `levels` are the noise
    levels at these, None where the scheduler does not tell; `solver` is the scheduler's class name.
    """

    def __init__(self, scheduler: Any, serves: Serves | None = None) -> None:
        self.token = scheduler.timesteps
        self.timesteps = [float(t) for t in torch.as_tensor(self.token).flatten().tolist()]
        sigmas = getattr(scheduler, "sigmas", None)
        values = [] if sigmas is None else torch.as_tensor(sigmas).flatten().tolist()
        self.sigmas = values if len(values) >= len(self.timesteps) else None
        # Flow matching has sigma in [0, 1]; elsewhere the timestep is the smoother coordinate.
        self.is_flow = self.sigmas is not None and max(self.sigmas, default=2.0) <= 1.0 + 1e-6
        served = [i for i, t in enumerate(self.timesteps) if serves is None or serves(t)]
        self.last = served[-1] if served else -1
        self.ordinals = [0]
        for a, b in pairwise(self.timesteps):
            self.ordinals.append(self.ordinals[-1] + (a != b))
        self.solver = type(scheduler).__name__
        self.levels: tuple[float, ...] | None = None
        if self.is_flow and self.sigmas:
            self.levels = tuple(dict(zip(self.ordinals, self.sigmas, strict=False)).values())

    def num_steps(self, start: int) -> int:
        """How many distinct times there are from `start` to the last one served."""
        return len(set(self.ordinals[start : self.last + 1]))

    def width(self, index: int) -> float | None:
        """How far sigma moves from here to the next call.

        None without flow matching, and for two-stage solvers, which weigh outputs otherwise.
        """
        two_stage = self.ordinals[-1] + 1 < len(self.timesteps)
        if not self.is_flow or two_stage or not self.sigmas or index + 1 >= len(self.sigmas):
            return None
        return self.sigmas[index + 1] - self.sigmas[index]

    def place(
        self,
        timestep: float,
        start: int,
        expected: int,
        form: Form | None = None,
        exact: bool = False,
    ) -> tuple[int, Form] | None:
        """Position of `timestep` at or after `start`, and the form in which it was given.

        Args:
            expected: where the trajectory is; this place or the next is taken if it fits at all.
            form: the form of this trajectory's calls before, None at the first.
            exact: they all named entries exactly, so one named before `start` came back.
        """
        if exact and timestep in self.timesteps and timestep not in self.timesteps[start:]:
            return None
        found = []
        for candidate in FORMS if form is None else (form,):
            index = self._nearest(candidate(timestep), start, expected)
            if index is not None:
                found.append((index, candidate))
        return min(found, key=lambda pair: pair[0]) if found else None

    def _nearest(self, timestep: float, start: int, expected: int) -> int | None:
        tolerance = ROUNDING * abs(timestep) + 1e-3
        off = [abs(t - timestep) for t in self.timesteps]
        if timestep % 1 == 0:  # some pipelines cut the fraction off (Helios in stages)
            cut = [0 < t - timestep < 1 for t in self.timesteps]
            off = [0.0 if whole else distance for whole, distance in zip(cut, off, strict=True)]
        for index in (expected, expected + 1):
            if start <= index < len(off) and off[index] <= tolerance:
                return index
        index = min(range(start, len(off)), key=off.__getitem__, default=-1)
        return index if index >= 0 and off[index] <= tolerance else None

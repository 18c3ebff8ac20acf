"""A scheduler's timesteps and noise levels, read once for each time that it is armed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BF16_ROUNDING = 2.0**-8
Serves = Callable[[float], bool]  # of two experts: whether this one is called at a timestep


class Schedule:
    """A host copy of what a scheduler was armed with; `token` is its `timesteps` tensor itself."""

    def __init__(self, scheduler: Any, serves: Serves | None = None) -> None:
        self.token = scheduler.timesteps
        self.timesteps = [float(t) for t in torch.as_tensor(self.token).flatten().tolist()]
        sigmas = getattr(scheduler, "sigmas", None)
        values = [] if sigmas is None else torch.as_tensor(sigmas).flatten().tolist()
        self.sigmas = values[: len(self.timesteps)] if len(values) >= len(self.timesteps) else None
        # Flow matching has sigma in [0, 1]; elsewhere the timestep is the smoother coordinate.
        self.is_flow = self.sigmas is not None and max(self.sigmas, default=2.0) <= 1.0 + 1e-6
        served = [i for i, t in enumerate(self.timesteps) if serves is None or serves(t)]
        self.last = served[-1] if served else -1
        self._indices: dict[float, list[int]] = {}
        for index, timestep in enumerate(self.timesteps):
            self._indices.setdefault(timestep, []).append(index)

    def times(self, start: int) -> tuple[float, ...]:
        """The distinct times from `start` to the last one served; two-stage solvers repeat them."""
        values = self.sigmas if self.is_flow and self.sigmas else self.timesteps
        return tuple(dict.fromkeys(values[start : self.last + 1]))

    def leap(self, start: int, end: int) -> bool:
        """Whether more than one distinct time lies in [start, end)."""
        return len(dict.fromkeys(self.timesteps[start:end])) > 1

    def find(self, timestep: float, start: int) -> int | None:
        """Position of `timestep` at or after `start`.

        Models are also given t / 1000 (Flux), 1 - t / 1000 (Lumina), and t rounded to bf16.
        """
        for index in self._indices.get(timestep, ()):
            if index >= start:
                return index
        if timestep in self._indices:
            return None
        forms = (timestep, timestep * 1000, (1 - timestep) * 1000) if timestep <= 1 else (timestep,)
        for form in forms:
            for index in range(start, len(self.timesteps)):
                if abs(self.timesteps[index] - form) <= BF16_ROUNDING * abs(form) + 1e-3:
                    return index
        return None

"""The time signal of a call: what the timestep makes of what the blocks are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class SignalCall:
    """One call of a denoiser, as far as a time signal depends on it.

    Attributes:
        module: the denoiser.
        timestep: as the denoiser was given it.
        block: its first block and the arguments of that; None where no block has been reached.
    """

    module: nn.Module
    timestep: float
    block: nn.Module | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


# Given a call and a kind (see `features.probes.TimeSignal`): the signal, or None where it cannot be
# read off this denoiser.
Signal = Callable[[SignalCall, str | None], Tensor | None]

"""Probes: something cheap that says how far the input moved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from .base import Part, Probe, part
from .published import published

if TYPE_CHECKING:
    from ..policy import Policy

SIGNALS = ("embedding", "modulation", "input")


@part("probe")
@dataclass(frozen=True, kw_only=True)
class SiteInput(Probe):
    """What goes into the cached site: the noisy latents, or a block's hidden states."""

    def fingerprint(self, entry: Tensor, here: Tensor) -> Tensor:
        return here


@part("probe")
@dataclass(frozen=True, kw_only=True)
class FrontResidual(Probe):
    """What the always-computed front blocks added: hidden states here minus those at block 0."""

    blocks: ClassVar[bool] = True

    def fingerprint(self, entry: Tensor, here: Tensor) -> Tensor:
        return here - entry


@part("probe")
@dataclass(frozen=True, kw_only=True)
class TimeSignal(Probe):
    """What the timestep makes of the blocks' input; `pipelines/signals.py` reads it off the model.

    Attributes:
        signal: "embedding" (of the timestep), "modulation" (what the blocks get of it), "input"
            (the first block's hidden states as modulated by it); None: the one that TeaCache
            publishes a polynomial for, and "input" for other models.
    """

    signal: Literal["embedding", "modulation", "input"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.signal not in (*SIGNALS, None):
            raise ValueError(f"signal must be one of {', '.join(SIGNALS)}, got {self.signal!r}")

    def fitted(self, policy: Policy, model: str) -> Part:
        known = published("teacache", getattr(policy.gate, "model", None) or model)
        signal: Any = next(iter(known["signals"])) if known else "input"
        return self if self.signal is not None else replace(self, signal=signal)

    def fingerprint(self, entry: Tensor, here: Tensor) -> Tensor:
        raise NotImplementedError("a time signal is read off the model, not off its tensors")

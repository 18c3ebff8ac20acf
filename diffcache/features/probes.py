"""Probes: something cheap that says how far the input moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from .base import Probe, part


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

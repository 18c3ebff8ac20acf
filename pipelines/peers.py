"""The caches of other libraries, each over a grid of its own settings, for `diffcache bench`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

INSTALL = "not installed: pip install 'diffcache[peers]'"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One cache of another library at one setting.

    Attributes:
        family: library and method, "diffusers FirstBlockCache".
        setting: what is printed beside it, "threshold=0.05".
        block_gating: whether it decides by the residual of the first blocks and holds the rest,
            without a forecast.
        apply: `with peer.apply(pipe):` the pipeline runs with this cache; afterwards it is exactly
            as before. Raises DiffcacheError where `prepare` has not run.
        prepare: None, or `prepare(pipe, run)`, to be called once before `apply`; `run()` makes one
            full clip with `pipe`. Settings of one family share what it finds, so only the first
            call of a family makes a clip.
    """

    family: str
    setting: str
    block_gating: bool
    apply: Callable[[Any], AbstractContextManager[None]]
    prepare: Callable[[Any, Callable[[], Any]], None] | None = None


def peers(pipe: Any, num_steps: int) -> tuple[list[Peer], dict[str, str]]:
    """All peers that run on this pipeline, and for the others a reason.

    Args:
        pipe: a diffusers pipeline; it is left as it is.
        num_steps: solver steps of the runs; warm-ups and MagCache's curve depend on it.

    Returns:
        The peers, family by family from careful to fast; {family: why it does not run} in a line.
    """
    from . import peers_cache_dit, peers_diffusers

    found: list[Peer] = []
    missing: dict[str, str] = {}
    for library in (peers_diffusers, peers_cache_dit):
        runs, reasons = library.peers(pipe, num_steps)
        found += runs
        missing |= reasons
    return found, missing

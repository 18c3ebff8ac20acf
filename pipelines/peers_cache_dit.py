"""cache-dit's DBCache, with and without its forecasters, over a grid sized to the denoiser."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import nn

from diffcache.errors import DiffcacheError

from .denoisers import denoisers
from .peers import INSTALL, Peer
from .peers_restore import restored

FAMILY = "cache-dit DBCache"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of DBCache.

    Attributes:
        front: blocks from the first on that always run and whose residual is compared (Fn).
        threshold: relative change of that residual below which the others are skipped.
        warm_up: steps before the first skip.
        in_a_row: skips allowed in a row, -1 for any number.
    """

    front: int
    threshold: float
    warm_up: int
    in_a_row: int = -1

    def __str__(self) -> str:
        row = "" if self.in_a_row < 0 else f" in_a_row={self.in_a_row}"
        return f"F{self.front}B0 threshold={self.threshold} warm_up={self.warm_up}{row}"


def peers(pipe: Any, num_steps: int) -> tuple[list[Peer], dict[str, str]]:
    """The settings of cache-dit for this pipeline, or why it does not run."""
    if find_spec("cache_dit") is None:
        return [], {FAMILY: INSTALL}
    blocks = max(map(_longest, denoisers(pipe).values()), default=0)
    if blocks < 2:
        return [], {FAMILY: "found no list of two blocks or more in the denoiser"}
    warm_up = max(1, min(4, num_steps // 5))
    found = [_peer(FAMILY, str(setting), setting, None) for setting in _plain_grid(blocks, warm_up)]
    for name, calibrator in _forecasters().items():
        for setting in _forecast_grid(warm_up):
            found.append(_peer(f"{FAMILY} + {name}", str(setting), setting, calibrator))
    try:
        with found[0].apply(pipe):
            return found, {}
    except Exception as error:
        return [], {FAMILY: " ".join(str(error).split()) or type(error).__name__}


def _plain_grid(blocks: int, warm_up: int) -> list[Setting]:
    """From one block in front to cache-dit's default of 8, or two thirds of the blocks."""
    middle, many = max(1, blocks // 3), max(1, min(8, 2 * blocks // 3))
    first = [
        Setting(front=1, threshold=threshold, warm_up=warm_up)
        for threshold in (0.05, 0.08, 0.12, 0.2, 0.3)
    ]
    more = [
        Setting(front=front, threshold=threshold, warm_up=warm_up)
        for front in dict.fromkeys((middle, many))
        if front > 1
        for threshold in (0.08, 0.2)
    ]
    return [*first, *more, Setting(front=1, threshold=0.2, warm_up=2 * warm_up)]


def _forecast_grid(warm_up: int) -> list[Setting]:
    """One block in front; a forecast bears larger thresholds, but not long rows."""
    grid = ((0.12, 2), (0.2, 3), (0.3, 4), (0.5, 5), (0.99, 7), (0.99, 10))
    return [
        Setting(front=1, threshold=threshold, warm_up=warm_up, in_a_row=in_a_row)
        for threshold, in_a_row in grid
    ]


def _forecasters() -> dict[str, Callable[[], Any]]:
    def config(name: str, **settings: Any) -> Any:
        import cache_dit

        return getattr(cache_dit, f"{name}CalibratorConfig")(**settings)

    return {
        "TaylorSeer": partial(config, "TaylorSeer", taylorseer_order=1),
        "TaylorSeer order 2": partial(config, "TaylorSeer", taylorseer_order=2),
        "FoCa": partial(config, "FoCa"),
        "DMD": partial(config, "DMD"),
    }


@contextmanager
def cached(
    pipe: Any, setting: Setting, calibrator: Callable[[], Any] | None = None
) -> Iterator[None]:
    """`pipe` with DBCache, put back exactly afterwards; other pipelines of its class never see it.

    Raises:
        DiffcacheError: cache-dit does not take this pipeline.
    """
    import cache_dit

    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=setting.front,
        Bn_compute_blocks=0,
        residual_diff_threshold=setting.threshold,
        max_warmup_steps=setting.warm_up,
        max_continuous_cached_steps=setting.in_a_row,
    )
    with _silent(), restored(pipe):
        try:
            cache_dit.enable_cache(
                pipe,
                cache_config=config,
                calibrator_config=calibrator() if calibrator else None,
            )
        except Exception as error:
            said = " ".join(str(error).split()) or type(error).__name__
            raise DiffcacheError(
                f"cache-dit does not take {type(pipe).__name__}: {said}"
            ) from error
        try:
            yield
        finally:
            cache_dit.disable_cache(pipe)


@contextmanager
def _silent() -> Iterator[None]:
    """Only errors of cache-dit are logged, which prints its settings to stdout otherwise."""
    known = logging.root.manager.loggerDict
    names = [name for name in known if name.split(".")[0].lower() == "cache_dit"]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _longest(denoiser: nn.Module) -> int:
    """Blocks in the longest list of modules directly in this denoiser."""
    lists = (child for child in denoiser.children() if isinstance(child, nn.ModuleList))
    return max(map(len, lists), default=0)


def _peer(family: str, setting: str, chosen: Setting, calibrator: Callable[[], Any] | None) -> Peer:
    return Peer(
        family=family,
        setting=setting,
        block_gating=calibrator is None,
        apply=partial(cached, setting=chosen, calibrator=calibrator),
    )

"""The caches that diffusers ships as hooks: one function per method gives its grid of settings."""

from __future__ import annotations

import ast
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from functools import partial
from typing import Any

from torch import nn

from diffcache.errors import DiffcacheError

from .denoisers import denoisers
from .peers import Peer
from .peers_restore import restored

Config = Callable[[Any], Any]  # what makes a fresh config for a pipeline, as some hold a callback

# TaylorSeerCacheConfig's default patterns match no module of Wan; these name what the method's
# authors forecast: the output of each attention and of each feed-forward part.
PARTS = [r".*\.(attn\d?|ffn?)"]
WHOLE_FASTER_CACHE = (
    "its part on guidance reads both passes from one batch (IndexError where they are two calls, "
    "as on Wan); its attention part is listed"
)
TAYLOR = ((2, 1), (3, 1), (4, 1), (4, 2), (6, 2), (8, 2), (10, 2))  # interval and order
MIDDLE, NEARLY_ALL = (100, 800), (50, 950)  # timesteps; the first is diffusers' default


def peers(pipe: Any, num_steps: int) -> tuple[list[Peer], dict[str, str]]:
    """The peers of diffusers that hook this pipeline, and why the others do not."""
    found: list[Peer] = []
    missing = {"diffusers FasterCache": WHOLE_FASTER_CACHE}
    for grid in GRIDS:
        try:
            family = grid(pipe, num_steps)
        except ImportError as error:
            missing[f"diffusers {grid.__name__}"] = f"this diffusers has none ({error})"
            continue
        reason = why_not(pipe, family[0])
        if reason is None:
            found += family
        else:
            missing[family[0].family] = reason
    return found, missing


def why_not(pipe: Any, peer: Peer) -> str | None:
    """The reason why a peer cannot be put on this pipeline, found by trying; else None."""
    trial = peer.apply if peer.prepare is None else Curve(1).calibrating
    try:
        with trial(pipe):
            return None
    except Exception as error:
        return " ".join(str(error).split()) or type(error).__name__


def first_block(pipe: Any, num_steps: int) -> list[Peer]:
    """FirstBlockCache: skips all but the first block while its residual changes little."""
    from diffusers.hooks import FirstBlockCacheConfig

    return [
        _peer(
            "FirstBlockCache",
            f"threshold={threshold}",
            _fixed(FirstBlockCacheConfig, threshold=threshold),
            block_gating=True,
        )
        for threshold in (0.03, 0.05, 0.08, 0.12, 0.2, 0.3)
    ]


def taylorseer(pipe: Any, num_steps: int) -> list[Peer]:
    """TaylorSeer on the parts of each block, with factors in the model's own precision."""
    from diffusers.hooks import TaylorSeerCacheConfig

    return [
        _peer(
            "TaylorSeer",
            f"interval={interval} order={order}",
            _fixed(
                TaylorSeerCacheConfig,
                cache_interval=interval,
                max_order=order,
                taylor_factors_dtype=_dtype(pipe),
                cache_identifiers=PARTS,
            ),
        )
        for interval, order in TAYLOR
    ]


def taylorseer_lite(pipe: Any, num_steps: int) -> list[Peer]:
    """TaylorSeer in lite mode: forecasts the last projection, and replaces the blocks by zeros."""
    from diffusers.hooks import TaylorSeerCacheConfig

    return [
        _peer(
            "TaylorSeer lite",
            f"interval={interval} order={order}",
            _fixed(
                TaylorSeerCacheConfig,
                cache_interval=interval,
                max_order=order,
                taylor_factors_dtype=_dtype(pipe),
                use_lite_mode=True,
            ),
        )
        for interval, order in TAYLOR
    ]


def sea_cache(pipe: Any, num_steps: int) -> list[Peer]:
    """SeaCache: gates by the filtered spectrum of the latents; holds or extrapolates residuals."""
    from diffusers.hooks import SeaCacheConfig

    grid = ((0.1, 1, 2), (0.4, 1, 2), (0.4, 1, 4), (0.8, 1, 6), (1.2, 1, 9), (1.8, 1, 12))
    return [
        _peer(
            "SeaCache",
            f"threshold={threshold} order={order} in_a_row={in_a_row}",
            _fixed(
                SeaCacheConfig,
                threshold=threshold,
                residual_order=order,
                max_consecutive_cached=in_a_row,
            ),
        )
        for threshold, order, in_a_row in grid
    ]


def broadcast(pipe: Any, num_steps: int) -> list[Peer]:
    """Pyramid Attention Broadcast: one state for both guidance passes, so they mix on Wan."""
    from diffusers.hooks import PyramidAttentionBroadcastConfig

    grid = ((2, 2, MIDDLE), (4, 6, MIDDLE), (2, 2, NEARLY_ALL), (4, 6, NEARLY_ALL))
    return [
        _peer(
            "PyramidAttentionBroadcast",
            f"self={every} cross={cross} timesteps={span[0]}-{span[1]}",
            _timed(
                PyramidAttentionBroadcastConfig,
                spatial_attention_block_skip_range=every,
                cross_attention_block_skip_range=cross,
                spatial_attention_timestep_skip_range=span,
                cross_attention_timestep_skip_range=span,
            ),
        )
        for every, cross, span in grid
    ]


def faster_cache_attention(pipe: Any, num_steps: int) -> list[Peer]:
    """FasterCache without its part on guidance: attention extrapolated from two computed calls.

    It takes the two passes for two steps, as PyramidAttentionBroadcast does.
    """
    from diffusers.hooks import FasterCacheConfig

    return [
        _peer(
            "FasterCache attention",
            f"every={every} timesteps<{below}",
            _timed(
                FasterCacheConfig,
                spatial_attention_block_skip_range=every,
                spatial_attention_timestep_skip_range=(-1, below),
                attention_weight_callback=lambda _: 0.3,
                is_guidance_distilled=True,
            ),
        )
        for every, below in ((2, 681), (3, 681), (2, 900), (4, 900))
    ]


def mag_cache(pipe: Any, num_steps: int) -> list[Peer]:
    """MagCache, with the curve that its own calibration measures on the first clip."""
    curve = Curve(num_steps)
    grid = (
        (0.03, 2, 0.2),
        (0.06, 3, 0.2),
        (0.12, 4, 0.2),
        (0.25, 6, 0.1),
        (0.5, 8, 0.1),
        (1, 10, 0.06),
    )
    return [
        _peer(
            "MagCache",
            f"threshold={threshold} in_a_row={in_a_row} warm_up={warm_up}",
            partial(
                curve.config, threshold=threshold, max_skip_steps=in_a_row, retention_ratio=warm_up
            ),
            prepare=curve.measure,
        )
        for threshold, in_a_row, warm_up in grid
    ]


GRIDS = (
    first_block,
    taylorseer,
    taylorseer_lite,
    mag_cache,
    sea_cache,
    broadcast,
    faster_cache_attention,
)


class Curve:
    """MagCache's ratios over `num_steps` steps, measured once for all its settings."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.measured: list[float] | None = None

    def measure(self, pipe: Any, run: Callable[[], Any]) -> None:
        """Makes a clip with `run` in calibration mode, unless one was made before.

        diffusers prints one list per guidance pass, without a name, and takes one: the first that
        was printed is kept, which is that of the conditional pass.

        Raises:
            DiffcacheError: nothing was printed, so the run had fewer steps than promised.
        """
        if self.measured is not None:
            return
        printed = io.StringIO()
        with self.calibrating(pipe), redirect_stdout(printed):
            run()
        lists = [line for line in printed.getvalue().splitlines() if line.startswith("[1")]
        if not lists:
            raise DiffcacheError(
                f"MagCache printed no curve: its clip must have all {self.num_steps} steps"
            )
        self.measured = ast.literal_eval(lists[0])

    def calibrating(self, pipe: Any) -> AbstractContextManager[None]:
        """`pipe` in MagCache's calibration mode, in which nothing is skipped."""
        from diffusers.hooks import MagCacheConfig

        config = _fixed(MagCacheConfig, calibrate=True, num_inference_steps=self.num_steps)
        return hooked(pipe, config)

    def config(self, pipe: Any, **settings: Any) -> Any:
        """A MagCacheConfig with the measured curve; DiffcacheError before `measure`."""
        from diffusers.hooks import MagCacheConfig

        if self.measured is None:
            raise DiffcacheError("MagCache has no curve yet: call the peer's prepare(pipe, run)")
        return MagCacheConfig(
            num_inference_steps=self.num_steps, mag_ratios=list(self.measured), **settings
        )


@contextmanager
def hooked(pipe: Any, config: Config) -> Iterator[None]:
    """`pipe` with a diffusers cache on each denoiser, put back exactly afterwards.

    Raises:
        DiffcacheError: a denoiser takes no such cache, or the cache found nothing to hook.
    """
    found = denoisers(pipe)
    if not found:
        raise DiffcacheError(f"{type(pipe).__name__} has no denoiser")
    with restored(pipe), ExitStack() as disable:
        for name, denoiser in found.items():
            model: Any = denoiser  # of diffusers: a ModelMixin with a CacheMixin
            if not hasattr(denoiser, "enable_cache"):
                raise DiffcacheError(f"{name} ({type(denoiser).__name__}) has no enable_cache")
            model.enable_cache(config(pipe))
            disable.callback(model.disable_cache)
            if not _hooks(denoiser):
                raise DiffcacheError(f"hooks nothing in {name} ({type(denoiser).__name__})")
        yield


def _hooks(denoiser: nn.Module) -> bool:
    """Whether any module, below it or itself, has a diffusers hook."""
    registries = (vars(module).get("_diffusers_hook") for module in denoiser.modules())
    return any(registry is not None and registry.hooks for registry in registries)


def _dtype(pipe: Any) -> Any:
    return getattr(next(iter(denoisers(pipe).values()), None), "dtype", None)


def _fixed(kind: Callable[..., Any], **settings: Any) -> Config:
    return lambda _: kind(**settings)


def _timed(kind: Callable[..., Any], **settings: Any) -> Config:
    """For caches that ask the pipeline for its timestep."""
    return lambda pipe: kind(current_timestep_callback=lambda: pipe.current_timestep, **settings)


def _peer(
    method: str,
    setting: str,
    config: Config,
    *,
    block_gating: bool = False,
    prepare: Callable[[Any, Callable[[], Any]], None] | None = None,
) -> Peer:
    apply: Callable[[Any], AbstractContextManager[None]] = partial(hooked, config=config)
    return Peer(
        family=f"diffusers {method}",
        setting=setting,
        block_gating=block_gating,
        apply=apply,
        prepare=prepare,
    )

"""What a rolling cache is told when it is made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .codec import FLOATS, STORAGE, token_nbytes
from .positions import Positions, Span, stride
from .scopes import Scope, scope

COUNTS = ("num_layers", "batch_size", "num_heads", "head_dim", "frame_tokens")


@dataclass(frozen=True, kw_only=True)
class RollingSettings:
    """Sizes, scopes and forms of a rolling cache; all of it is known before a byte is allocated.

    Attributes:
        sink_size: how many of the first frames stay for ever.
        window_size: how many of the last frames stay, beside the chunk being made.
        num_layers, batch_size, num_heads, head_dim: as in the model; heads are those of the keys.
        frame_tokens: tokens of one latent frame.
        positions: a mode of `Positions`, or its name.
        max_position: length of the rotary table in frames; None for no bound.
        scopes: what each layer keeps (see `scopes`): one name for all layers, or one per layer.
        storage: float32, bfloat16, float16, float8_e4m3 or int8.
        dtype: what a read gives.
        device: where the slots lie.
        device_size: frames of each layer that lie there, sinks and the newest; older ones lie in
            the host's memory. None for all.
        page_tokens: size of the pages whose summaries are kept, a divisor of frame_tokens; None
            for no pages.

    Raises:
        ValueError: a size out of range, an unknown name, a table of the wrong length.
    """

    sink_size: int
    window_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    frame_tokens: int
    batch_size: int = 1
    positions: Positions | str = Positions.KEEP
    max_position: int | None = None
    scopes: tuple[str, ...] | str = "sink+window"
    storage: str = "bfloat16"
    dtype: str = "bfloat16"
    device: str = "cpu"
    device_size: int | None = None
    page_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in COUNTS:
            _check_count(name, getattr(self, name), 1)
        for name in ("sink_size", "window_size"):
            _check_count(name, getattr(self, name), 0)
        if self.max_position is not None:
            _check_count("max_position", self.max_position, 1)
        if self.device_size is not None:
            _check_count("device_size", self.device_size, self.sink_size + 1)
        if self.page_tokens is not None:
            _check_count("page_tokens", self.page_tokens, 1)
            if self.frame_tokens % self.page_tokens:
                raise ValueError(
                    f"page_tokens must divide {self.frame_tokens}, got {self.page_tokens}"
                )
        modes = [mode.value for mode in Positions]
        _check_choice("positions", getattr(self.positions, "value", self.positions), modes)
        _check_choice("storage", self.storage, STORAGE)
        _check_choice("dtype", self.dtype, FLOATS)
        object.__setattr__(self, "positions", Positions(self.positions))
        object.__setattr__(self, "device", str(self.device))  # a torch.device is one, too
        names = self.scopes
        if not isinstance(names, str | list | tuple):
            raise ValueError(f"scopes must be a name or a list of them, got {names!r}")
        table = (names,) * self.num_layers if isinstance(names, str) else tuple(names)
        if len(table) != self.num_layers:
            raise ValueError(f"scopes must name {self.num_layers} layers, got {len(table)}")
        object.__setattr__(self, "scopes", table)
        if self.mode is Positions.RECOMPUTE and len(set(table)) > 1:
            raise ValueError("positions='recompute' needs the same scope in every layer")
        if self.mode is Positions.RENUMBER:
            self._check_renumber(self.span)

    def _check_renumber(self, span: Span) -> None:
        if span.max_position is None:
            raise ValueError("positions='renumber' needs max_position, the rotary table's length")
        if stride(span) < 1:
            needed = span.sink_size + span.reach + 2
            raise ValueError(
                f"max_position must be at least {needed} to renumber, got {span.max_position}"
            )

    @property
    def mode(self) -> Positions:
        return Positions(self.positions)

    @property
    def layers(self) -> list[Scope]:
        """The scope of each layer."""
        return [scope(name, self.sink_size, self.window_size) for name in self.scopes]

    @property
    def span(self) -> Span:
        """The bounds that all layers share, so that one chunk has one set of positions."""
        reach = max(layer.reach for layer in self.layers)
        return Span(sink_size=self.sink_size, reach=reach, max_position=self.max_position)

    @property
    def torch_dtype(self) -> torch.dtype:
        return FLOATS[self.dtype]

    def device_slots(self, kept: Scope) -> int:
        """How many slots of a layer of that scope lie on the device."""
        return kept.slots if self.device_size is None else min(kept.slots, self.device_size)

    def frame_nbytes(self) -> int:
        """Bytes of the keys and values of one frame in one layer, summaries aside."""
        tokens = 2 * self.frame_tokens * self.num_heads
        return tokens * token_nbytes(self.storage, self.head_dim)

    def summary_nbytes(self) -> int:
        """Bytes of the page summaries of one frame in one layer: three in fp32 for each page."""
        pages = 0 if self.page_tokens is None else self.frame_tokens // self.page_tokens
        return 3 * pages * self.num_heads * self.head_dim * 4

    def nbytes(self) -> int:
        """Bytes that the cache will hold from its first moment to its last, snapshots aside."""
        frames = self.batch_size * sum(layer.slots for layer in self.layers)
        return frames * (self.frame_nbytes() + self.summary_nbytes())

    def host_nbytes(self) -> int:
        """How many of these lie in the host's memory, behind `device_size`."""
        frames = sum(layer.slots - self.device_slots(layer) for layer in self.layers)
        return self.batch_size * frames * self.frame_nbytes()

    def to_dict(self) -> dict[str, object]:
        """Plain values, as `RollingSettings(**...)` takes them."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**plain, "positions": self.mode.value, "scopes": list(self.scopes)}


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def _check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    known = list(choices)
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")

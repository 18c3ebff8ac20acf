"""The parts of a KV policy: scorer, budget, compressor, storage, protection, trigger.

A part is a frozen dataclass: its fields are its settings, nothing else lives on it, so one part
may serve many caches at once. What scorers see of a layer is a `LayerView`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from .. import parts
from ..parts import PartT, SlotPart, check_count, check_range

if TYPE_CHECKING:
    from .bits import Codec
    from .layer_view import LayerView
    from .plan import Plan

SLOTS = ("scorer", "budget", "compressor", "storage", "protection", "trigger")
PARTS: parts.Registry = {slot: {} for slot in SLOTS}


def part(slot: str) -> Callable[[type[PartT]], type[PartT]]:
    """Registers a part under its class name in snake_case."""
    return parts.registered(PARTS, slot)


def build(slot: str, description: Any) -> SlotPart:
    """A part from itself, its kind or what `to_dict` wrote; see `diffcache.parts.build`."""
    return parts.build(PARTS, slot, description)


@dataclass(frozen=True, kw_only=True)
class Scorer(SlotPart):
    """Says what each cached token is worth."""

    @property
    def queries(self) -> int:
        """How many of the last queries it looks at; they are remembered from call to call."""
        return 0

    @property
    def prompt_queries(self) -> bool:
        """Whether it looks at all queries of the forward pass at hand."""
        return False

    @property
    def accumulates(self) -> bool:
        """Whether it needs `LayerView.received`, the attention that each token ever received."""
        return False

    @property
    def rotates(self) -> bool:
        """Whether it needs the model's rotary embedding, `Facts.rotate`."""
        return False

    @property
    def projects(self) -> bool:
        """Whether it needs the layer's output projection, `Facts.output_weight`."""
        return False

    def score(self, view: LayerView) -> Tensor:
        """[batch, heads, slots] of any float type, higher = keep.

        Heads are those of the view's keys, or those that are stored.

        What it gives for slots that hold no token does not matter.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Budget(SlotPart):
    """How many tokens may stay, and where. Exactly one of tokens, bytes and keep is given.

    Attributes:
        tokens: tokens per layer and head, on average.
        bytes: bytes of the whole cache.
        keep: fraction of the tokens seen, rounded down; 1 keeps everything.
    """

    per_head: ClassVar[bool] = False  # heads of one layer may keep different numbers
    cascade: ClassVar[bool] = False  # layers are compared with each other

    tokens: int | None = None
    bytes: int | None = None
    keep: float | None = None

    def __post_init__(self) -> None:
        given = [n for n in ("tokens", "bytes", "keep") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError(f"a budget needs exactly one of tokens, bytes, keep, got {given}")
        if self.tokens is not None:
            check_count("tokens", self.tokens, 1)
        if self.bytes is not None:
            check_count("bytes", self.bytes, 1)
        if self.keep is not None:
            check_range("keep", self.keep, 0, 1)

    @property
    def queries(self) -> int:
        """As of a scorer."""
        return 0

    def target(self, seen: Tensor, affordable: int | None) -> Tensor:
        """int64 [batch]: tokens per head, on average over layers and heads, of each row.

        Args:
            seen: int64 [batch], real tokens.
            affordable: what `bytes` pays for; None for other budgets.
        """
        if self.keep is not None:
            # The fraction is meant as written: 0.29 * 100 is 28.999... in floating point.
            return torch.floor(seen.double() * self.keep + 1e-9).long()
        limit = self.tokens if affordable is None else affordable
        assert limit is not None
        return seen.clamp(max=limit)

    def split(self, target: Tensor, scores: Tensor, view: LayerView) -> Tensor:
        """int64 [batch, heads]: how many slots each head of this layer keeps.

        Args:
            target: int64 [batch], the mean over layers and heads.
            scores: [batch, heads, slots], -inf where no token is, +inf where one is protected.
        """
        return target[:, None].expand(-1, scores.shape[1])

    def preference(self, view: LayerView) -> Tensor:
        """[batch]: the share this layer asks for; only where `cascade`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Compressor(SlotPart):
    """What becomes of tokens that the budget does not keep."""

    nature: ClassVar[str] = "lossy"  # or "bounded": every token stays, within an error
    extra: ClassVar[int] = 0  # slots per head that it adds, paid for by the budget
    per_token: ClassVar[bool] = False  # reads the keys and values that are stored

    def plan(self, view: LayerView, keep: Tensor) -> Plan:
        """Args: keep: bool [batch, heads, slots], what the budget keeps; heads that are stored."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Storage(SlotPart):
    """In which form kept tokens lie."""

    ragged: ClassVar[bool] = False  # heads may hold different numbers without holes

    @property
    def newest(self) -> int:
        """How many of the newest tokens stay in full precision, where others do not."""
        return 0

    def codec(self, dtype: torch.dtype) -> Codec:
        """The form of all but the tail."""
        raise NotImplementedError

    def flat(self) -> bool:
        """Whether heads lie one after the other without holes."""
        return self.ragged


@dataclass(frozen=True, kw_only=True)
class Protection(SlotPart):
    """Which tokens stay whatever their score, within the budget."""

    def mask(self, view: LayerView, target: Tensor) -> Tensor:
        """bool [batch, 1 or heads, slots]; target: int64 [batch], the budget's mean per head."""
        raise NotImplementedError

    def least(self) -> int:
        """How many tokens it protects at least, once there are so many."""
        return 0


@dataclass(frozen=True, kw_only=True)
class Event:
    """What a trigger is told after a layer's attention.

    Attributes:
        new: tokens of this forward pass.
        steps: forward passes since the layer was last compressed, this one included.
        over: by how many tokens a head exceeds the budget's mean, on average over the heads.
    """

    new: int
    steps: int
    over: int


@dataclass(frozen=True, kw_only=True)
class Trigger(SlotPart):
    """When a layer is compressed."""

    decodes: ClassVar[bool] = False  # fires at one-token passes too
    remembers: ClassVar[bool] = False  # fires where a pass's own queries are too few

    def due(self, event: Event) -> bool:
        raise NotImplementedError


@functools.lru_cache(maxsize=1)
def discover() -> None:
    """Imports every part, so that files can name it."""
    import pkgutil
    from importlib import import_module

    from . import scorers

    for name in ("budgets", "compress", "protection", "storages", "triggers"):
        import_module(f".{name}", __package__)
    for module in pkgutil.iter_modules(scorers.__path__):
        import_module(f"{scorers.__name__}.{module.name}")

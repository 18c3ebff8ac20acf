"""A KV policy: the frozen description of a composition, to and from JSON and YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from .. import policy_files
from ..parts import changed, flat
from .base import (
    PARTS,
    SLOTS,
    Budget,
    Compressor,
    Protection,
    Scorer,
    Storage,
    Trigger,
    build,
    discover,
)
from .compress import Drop
from .layer_view import LayerView
from .positions import Positions
from .protection import Boundaries
from .storages import Contiguous
from .triggers import AfterPrefill

FORMAT = 1
AMOUNTS = ("tokens", "bytes", "keep")


@dataclass(frozen=True, kw_only=True)
class KVPolicy:
    """Which cached tokens stay, where, in which form, and when that is decided.

    Parts may be given as objects, as names of a kind, or as mappings {"kind": ..., settings}.

    Attributes:
        scorer, budget, compressor, storage, protection, trigger: the parts.
        positions: a mode of `Positions`; "keep" is what can be done where the host rotates keys
            before it caches them.
        name, source, summary: what it is called, where it was published, one line on it.

    Raises:
        ValueError: unknown kinds or settings, values out of range, parts that do not fit together.
    """

    scorer: Scorer
    budget: Budget
    compressor: Compressor = field(default_factory=Drop)
    storage: Storage = field(default_factory=Contiguous)
    positions: Positions | str = Positions.KEEP
    protection: Protection = field(default_factory=Boundaries)
    trigger: Trigger = field(default_factory=AfterPrefill)
    name: str = "custom"
    source: str = ""
    summary: str = ""

    def __post_init__(self) -> None:
        discover()
        for text in ("name", "source", "summary"):
            if not isinstance(getattr(self, text), str):
                raise ValueError(f"{text} must be text, got {getattr(self, text)!r}")
        for slot in SLOTS:
            object.__setattr__(self, slot, build(slot, getattr(self, slot)))
        modes = [mode.value for mode in Positions]
        if getattr(self.positions, "value", self.positions) not in modes:
            raise ValueError(f"positions must be one of {', '.join(modes)}, got {self.positions!r}")
        object.__setattr__(self, "positions", Positions(self.positions))
        if self.positions is not Positions.KEEP:
            raise ValueError(
                f"positions must be 'keep' in a KV policy, got {self.positions!r}: "
                "keys that the host has rotated stay where they are (RollingCache has the others)"
            )
        least = self.protection.least()
        if self.budget.tokens is not None and self.budget.tokens < least:
            raise ValueError(
                f"tokens must be at least the {least} that the protection keeps, "
                f"got {self.budget.tokens}"
            )
        if self.budget.bytes is not None and self.budget.per_head and not self.storage.ragged:
            raise ValueError(
                f"bytes cannot be promised where heads of {self.budget.kind} leave holes: take "
                "storage='ragged' or 'quantised'"
            )
        if self.budget.bytes is not None and self.compressor.nature == "bounded":
            raise ValueError(
                f"bytes cannot be promised where {self.compressor.kind} keeps every token: give "
                "tokens or keep, those that stay as they are"
            )

    @property
    def exact(self) -> bool:
        """Whether nothing is ever evicted or coded."""
        return self.budget.keep == 1 and self.storage.codec(torch.float32).name == "full"

    @property
    def nature(self) -> str:
        """exact (nothing ever goes), bounded (every token stays, within an error) or lossy."""
        if self.exact:
            return "exact"
        stays = self.budget.keep == 1 or self.compressor.nature == "bounded"
        return "bounded" if stays else "lossy"

    def scores(self, view: LayerView, target: Tensor) -> Tensor:
        """fp32 [batch, stored heads, slots]: +inf where protected, -inf where no token is.

        A score that is not a number counts as the lowest.
        """
        scores = view.by_stored_head(self.scorer.score(view)).float()
        number = torch.finfo(torch.float32)
        scores = scores.nan_to_num(nan=number.min, posinf=number.max, neginf=number.min)
        scores = scores.masked_fill(self.protection.mask(view, target), float("inf"))
        return scores.masked_fill(~view.live, float("-inf"))

    def counts(self, target: Tensor, scores: Tensor, view: LayerView) -> Tensor:
        """int64 [batch, heads]: slots that each head keeps, protected ones in any case."""
        counts = self.budget.split(target, scores, view) - self.compressor.extra
        return torch.maximum(counts, (scores == float("inf")).sum(-1))

    def parts(self) -> dict[str, Any]:
        return {slot: getattr(self, slot) for slot in SLOTS}

    def settings(self) -> dict[str, Any]:
        """Every setting of a part by name; one that two parts share is written "budget.keep"."""
        return flat(self.parts())

    def with_settings(self, **overrides: Any) -> KVPolicy:
        """A copy with some settings, or whole parts (`scorer="key_difference"`), replaced.

        One of tokens, bytes and keep replaces what the budget had of them.

        Raises:
            ValueError: no part has such a setting; the message lists near matches.
        """
        names = {f.name for f in fields(self)}
        whole: Any = {name: value for name, value in overrides.items() if name in names}
        policy = replace(self, **whole)
        given = {name: overrides[name] for name in AMOUNTS if name in overrides}
        if given:
            amounts: Any = {name: given.get(name) for name in AMOUNTS}
            policy = replace(policy, budget=replace(policy.budget, **amounts))
        for name in [name for name in overrides if name not in (*names, *AMOUNTS)]:
            new = changed(PARTS, policy.parts(), self.name, name, overrides[name])
            policy = replace(policy, **cast(Any, new))
        return policy

    def describe(self) -> str:
        """One line: "key_difference(...) . uniform(...) . drop . contiguous . ..."."""
        return " . ".join(piece.describe() for piece in self.parts().values())

    def to_dict(self) -> dict[str, Any]:
        texts = {name: getattr(self, name) for name in ("name", "source", "summary")}
        parts = {slot: piece.to_dict() for slot, piece in self.parts().items()}
        mode = cast(Positions, self.positions).value
        return {"diffcache_kv_policy": FORMAT, **texts, **parts, "positions": mode}

    @classmethod
    def from_dict(cls, description: Mapping[str, Any]) -> KVPolicy:
        """What `to_dict` wrote.

        Raises:
            ValueError: not a KV policy, another format, unknown or missing keys.
        """
        return cls(
            **policy_files.entries(
                description,
                marker=("diffcache_kv_policy", FORMAT),
                what="KV policy",
                known={f.name: f for f in fields(cls)},
                needed=("scorer", "budget"),
            )
        )

    def save(self, path: str | Path) -> None:
        """Writes .json, .yaml or .yml."""
        policy_files.write(path, self.to_dict())


def load_kv_policy(path: str | Path) -> KVPolicy:
    """Reads a KV policy that `KVPolicy.save` wrote.

    Raises:
        ValueError: the file is no KV policy; the message names it.
        FileNotFoundError: there is no such file.
    """
    return policy_files.read(path, KVPolicy.from_dict)

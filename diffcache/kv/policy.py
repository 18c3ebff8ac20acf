"""A KV policy: the frozen description of a composition, to and from JSON and YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from ..parts import near
from .base import SLOTS, Budget, Compressor, Protection, Scorer, Storage, Trigger, build, discover
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
        found: dict[str, list[tuple[str, Any]]] = {}
        for slot, piece in self.parts().items():
            for f in fields(piece):
                found.setdefault(f.name, []).append((slot, getattr(piece, f.name)))
        flat: dict[str, Any] = {}
        for name, owners in found.items():
            for slot, value in owners:
                flat[name if len(owners) == 1 else f"{slot}.{name}"] = value
        return flat

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
        for name in overrides:
            if name not in names and name not in AMOUNTS:
                policy = policy._with(name, overrides[name])
        return policy

    def _with(self, name: str, value: Any) -> KVPolicy:
        slot, _, setting = name.rpartition(".")
        owners = [s for s, piece in self.parts().items() if setting in piece.__dataclass_fields__]
        owners = [owner for owner in owners if slot in ("", owner)]
        if len(owners) > 1:
            raise ValueError(
                f"{name!r} is a setting of {' and '.join(owners)}: write {owners[0]}.{name}"
            )
        if not owners:
            known = self.settings()
            raise ValueError(f"policy {self.name!r} has no setting {name!r}; {near(name, known)}")
        value = tuple(value) if isinstance(value, list) else value
        changed: Any = {owners[0]: replace(self.parts()[owners[0]], **{setting: value})}
        return replace(self, **changed)

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
        settings = dict(description)
        version = settings.pop("diffcache_kv_policy", None)
        if version != FORMAT:
            raise ValueError(
                f"diffcache_kv_policy must be {FORMAT}, got {version!r}: another kind of file"
            )
        known = {f.name: f for f in fields(cls)}
        for name in settings:
            if name not in known:
                raise ValueError(f"a KV policy has no key {name!r}; {near(name, known)}")
        missing = [name for name in ("scorer", "budget") if name not in settings]
        if missing:
            raise ValueError(f"the KV policy lacks {', '.join(missing)}")
        return cls(**settings)

    def save(self, path: str | Path) -> None:
        """Writes .json, .yaml or .yml."""
        path, form = Path(path), _form(Path(path))
        if form == "yaml":
            import yaml

            text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        else:
            text = json.dumps(self.to_dict(), indent=2) + "\n"
        path.write_text(text, encoding="utf-8")


def load_kv_policy(path: str | Path) -> KVPolicy:
    """Reads a KV policy that `KVPolicy.save` wrote.

    Raises:
        ValueError: the file is no KV policy; the message names it.
        FileNotFoundError: there is no such file.
    """
    path, form = Path(path), _form(Path(path))
    if not path.is_file():
        raise FileNotFoundError(f"there is no policy file {path}: check its path")
    try:
        text = path.read_text(encoding="utf-8")
        description = _parse(text, form)
        if not isinstance(description, dict):
            raise ValueError("a policy file holds one mapping")
        return KVPolicy.from_dict(description)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from error


def _parse(text: str, form: str) -> Any:
    if form == "json":
        return json.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {error}") from error


def _form(path: Path) -> Literal["json", "yaml"]:
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ValueError(f"{path}: a policy file ends in .json, .yaml or .yml")
    return "json" if path.suffix == ".json" else "yaml"

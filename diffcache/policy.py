"""A policy: the frozen description of a composition, to and from JSON and YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from . import policy_files
from .features import (  # noqa: F401 (registers)
    fitted,
    gates,
    guards,
    magnitudes,
    masks,
    metrics,
    predictors,
    probes,
    sites,
    store,
    tables,
)
from .features.base import PARTS, SLOTS, Gate, Metric, Part, Predictor, Probe, build
from .features.guards import Guards
from .features.sites import Site
from .features.store import Store
from .parts import changed, flat

if TYPE_CHECKING:
    from .context import CallContext

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which site is skipped, when, and what stands in for it.

    Parts may be given as objects, as names of a kind, or as mappings {"kind": ..., settings}.

    Attributes:
        site, probe, metric, gate, predictor, guards, store: the parts; probe and metric in pairs.
        axis: the coordinate that tells which computed call was "previous".
        exact: settings with which the output is bit-identical to no cache.
        name, source, summary: what it is called, where it was published, one line on it.

    Raises:
        ValueError: unknown kinds or settings, values out of range, parts that do not fit together.
    """

    site: Site
    gate: Gate
    predictor: Predictor
    probe: Probe | None = None
    metric: Metric | None = None
    axis: Literal["step", "chunk"] = "step"
    guards: Guards = field(default_factory=Guards)
    store: Store = field(default_factory=Store)
    exact: Mapping[str, Any] = field(default_factory=dict)
    name: str = "custom"
    source: str = ""
    summary: str = ""

    def __post_init__(self) -> None:
        for text in ("name", "source", "summary"):
            if not isinstance(getattr(self, text), str):
                raise ValueError(f"{text} must be text, got {getattr(self, text)!r}")
        if not isinstance(self.exact, Mapping):
            raise ValueError(f"exact must be settings by name, got {self.exact!r}")
        for slot in SLOTS:
            value = getattr(self, slot)
            if value is None and slot not in ("probe", "metric"):
                raise ValueError(f"a policy needs a {slot}")
            if value is not None:
                object.__setattr__(self, slot, build(slot, value))
        # Settings of parts that were exchanged for others go.
        known = self.settings()
        exact = {name: value for name, value in dict(self.exact).items() if name in known}
        object.__setattr__(self, "exact", exact)
        if self.axis not in ("step", "chunk"):
            raise ValueError(f"axis must be 'step' or 'chunk', got {self.axis!r}")
        if (self.probe is None) != (self.metric is None):
            raise ValueError("probe and metric come together: give both or neither")
        if self.probe is not None and self.probe.blocks and not self.site.blocks:
            raise ValueError(
                f"probe {self.probe.kind!r} needs a stack or span site, got {self.site.kind!r}"
            )

    @property
    def decides(self) -> Literal["item", "batch"]:
        """Whether batch items can influence each other's decisions."""
        shared = (
            self.metric is not None or self.predictor.adaptive or self.guards.max_error is not None
        )
        return "batch" if shared else "item"

    def parts(self) -> dict[str, Part]:
        return {slot: getattr(self, slot) for slot in SLOTS if getattr(self, slot) is not None}

    def settings(self) -> dict[str, Any]:
        """Every setting by name; one that two parts share is written "gate.threshold"."""
        return flat(self.parts())

    def with_settings(self, **overrides: Any) -> Policy:
        """A copy with some settings, or whole parts (`site="model"`, `gate={...}`), replaced.

        Raises:
            ValueError: no part has such a setting; the message lists near matches.
        """
        names = {f.name for f in fields(self)}
        whole: Any = {name: value for name, value in overrides.items() if name in names}
        policy = replace(self, **whole)
        for name in [name for name in overrides if name not in names]:
            new = changed(PARTS, policy.parts(), self.name, name, overrides[name])
            policy = replace(policy, **cast(Any, new))
        return policy

    def for_model(self, model: str) -> Policy:
        """A copy whose parts go by what was published for `model`, where they do not name one."""
        parts = {slot: piece.fitted(self, model) for slot, piece in self.parts().items()}
        changed: Any = {s: piece for s, piece in parts.items() if piece is not getattr(self, s)}
        return replace(self, **changed) if changed else self

    def remarks(self, context: CallContext) -> list[str]:
        """What the report of a run that begins with this call should say of the parts."""
        found = [piece.remark(self, context) for piece in self.parts().values()]
        return [remark for remark in found if remark is not None]

    def describe(self) -> str:
        """One line: "stack(front=1) . front_residual . relative_l1 . threshold(0.05) . hold"."""
        shown = [
            s
            for s in ("site", "probe", "metric", "gate", "predictor")
            if getattr(self, s) is not None
        ]
        return " . ".join(getattr(self, slot).describe() for slot in shown)

    def to_dict(self) -> dict[str, Any]:
        parts = {slot: piece.to_dict() for slot, piece in self.parts().items()}
        rest = {
            name: getattr(self, name) for name in ("axis", "exact", "name", "source", "summary")
        }
        return {"diffcache_policy": FORMAT, **rest, **parts}

    @classmethod
    def from_dict(cls, description: Mapping[str, Any]) -> Policy:
        """What `to_dict` wrote.

        Raises:
            ValueError: not a policy, another format, unknown or missing keys.
        """
        return cls(
            **policy_files.entries(
                description,
                marker=("diffcache_policy", FORMAT),
                what="policy",
                known={f.name: f for f in fields(cls)},
                needed=("site", "gate", "predictor"),
            )
        )

    def save(self, path: str | Path) -> None:
        """Writes .json, .yaml or .yml."""
        policy_files.write(path, self.to_dict())


def load(path: str | Path) -> Policy:
    """Reads a policy that `Policy.save` wrote.

    Raises:
        ValueError: the file is no policy; the message names it.
        FileNotFoundError: there is no such file.
    """
    return policy_files.read(path, Policy.from_dict)

"""A policy: the frozen description of a composition, to and from JSON and YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
from .features.base import SLOTS, Gate, Metric, Part, Predictor, Probe, as_setting, build, near
from .features.guards import Guards
from .features.sites import Site
from .features.store import Store

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
        found: dict[str, list[tuple[str, Any]]] = {}
        for slot, piece in self.parts().items():
            for name, value in asdict(piece).items():
                found.setdefault(name, []).append((slot, value))
        flat: dict[str, Any] = {}
        for name, owners in found.items():
            for slot, value in owners:
                flat[name if len(owners) == 1 else f"{slot}.{name}"] = value
        return flat

    def with_settings(self, **overrides: Any) -> Policy:
        """A copy with some settings, or whole parts (`site="model"`, `gate={...}`), replaced.

        Raises:
            ValueError: no part has such a setting; the message lists near matches.
        """
        names = {f.name for f in fields(self)}
        whole: Any = {name: value for name, value in overrides.items() if name in names}
        policy = replace(self, **whole)
        for name in [name for name in overrides if name not in names]:
            known = policy.settings()
            if name not in known:
                raise ValueError(
                    f"policy {self.name!r} has no setting {name!r}; {near(name, known)}"
                )
            policy = policy._with(name, overrides[name])
        return policy

    def _with(self, name: str, value: Any) -> Policy:
        slot, _, setting = name.rpartition(".")
        for owner, piece in self.parts().items():
            if setting in piece.__dataclass_fields__ and slot in ("", owner):
                changed: Any = {owner: replace(piece, **{setting: as_setting(value)})}
                return replace(self, **changed)
        raise ValueError(
            f"policy {self.name!r} has no setting {name!r}; {near(name, self.settings())}"
        )

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
        settings = dict(description)
        version = settings.pop("diffcache_policy", None)
        if version != FORMAT:
            raise ValueError(
                f"diffcache_policy must be {FORMAT}, got {version!r}: another version's file"
            )
        known = {f.name: f for f in fields(cls)}
        for name in settings:
            if name not in known:
                raise ValueError(f"a policy has no key {name!r}; {near(name, known)}")
        missing = [name for name in ("site", "gate", "predictor") if name not in settings]
        if missing:
            raise ValueError(f"the policy lacks {', '.join(missing)}")
        return cls(**settings)

    def save(self, path: str | Path) -> None:
        """Writes .json, .yaml or .yml."""
        path = Path(path)
        if _is_yaml(path):
            import yaml

            text = yaml.safe_dump(json.loads(json.dumps(self.to_dict())), sort_keys=False)
        else:
            text = json.dumps(self.to_dict(), indent=2) + "\n"
        path.write_text(text, encoding="utf-8")


def load(path: str | Path) -> Policy:
    """Reads a policy that `Policy.save` wrote.

    Raises:
        ValueError: the file is no policy; the message names it.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    yaml_file = _is_yaml(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no policy file {path}: check its path")
    try:
        text = path.read_text(encoding="utf-8")
        if yaml_file:
            import yaml

            description = yaml.safe_load(text)
        else:
            description = _from_json(text)
        if not isinstance(description, dict):
            raise ValueError("a policy file holds one mapping")
        return Policy.from_dict(description)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    except Exception as error:
        if type(error).__module__.startswith("yaml"):
            raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
        raise


def _from_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error


def _is_yaml(path: Path) -> bool:
    if path.suffix not in (".json", ".yaml", ".yml"):
        raise ValueError(f"{path}: a policy file ends in .json, .yaml or .yml")
    return path.suffix != ".json"

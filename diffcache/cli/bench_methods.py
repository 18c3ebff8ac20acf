"""What the bench compares: policies with their settings, fewer solver steps, plain hold, peers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..policy import Policy
from ..registry import get_policy
from .run_input import read_settings

REFERENCE, FEWER, HOLD = "reference", "fewer steps", "hold"
PRESETS = ("quality", "balanced", "fast")
FORECASTS = (0.6, 0.5, 0.36, 0.26, 0.18)  # of the steps, computed
# Where the error of a step is always above `max_error`, its extra steps only break up the table.
FASTEST = (0.16, 0.14, 0.12)
HOLDS = (0.5, 0.36, 0.26, 0.18, 0.12)
SHORTER = (0.7, 0.56, 0.46, 0.38, 0.32, 0.28, 0.24, 0.2, 0.16, 0.12)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row: a family (a line of the plot) at one setting.

    Attributes:
        policy: ours; None runs the plain pipeline, or a peer's cache on it.
        steps: solver steps instead of the condition's, for the baseline of fewer steps.
        peer: of `pipelines.peers`.
        kind: "reference", "baseline", "ours", "published" (a method of others, in our parts) or
            "peer".
    """

    family: str
    kind: str
    setting: str = ""
    policy: Policy | None = None
    steps: int | None = None
    peer: Any = None

    @property
    def key(self) -> str:
        return f"{self.family} {self.setting}".strip()

    def named(self) -> dict[str, Any]:
        """What a line of the results says of the method itself."""
        gating = bool(getattr(self.peer, "block_gating", False))
        named = {name: getattr(self, name) for name in ("family", "setting", "kind")}
        return {**named, "block_gating": gating}


def read_policies(texts: Sequence[str]) -> list[Method]:
    """Methods from "forecast", "first_block:threshold=0.04|0.08" or "my.json:fraction=0.3".

    Settings are separated by commas; values separated by | make a grid.

    Raises:
        ValueError: unknown policy or setting, or the same method twice.
    """
    found = [method for text in texts for method in _grid(text)]
    keys = [method.key for method in found]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise ValueError(f"--policy names {twice!r} twice")
    return found


def baselines(steps: int) -> list[Method]:
    """Fewer solver steps and plain hold, over the range in which policies lie."""
    counts = sorted({round(share * steps) for share in SHORTER} - {0, 1}, reverse=True)
    shorter = [
        Method(family=FEWER, kind="baseline", setting=str(count), steps=count) for count in counts
    ]
    return [*shorter, *_policies(HOLD, [{"fraction": share} for share in HOLDS])]


def ours() -> list[Method]:
    """The presets, and `forecast` from slow to fast."""
    presets = [method for name in PRESETS for method in _policies(name, [{}])]
    grid: list[dict[str, Any]] = [{"fraction": share} for share in FORECASTS]
    grid += [{"fraction": share, "max_error": None} for share in FASTEST]
    return [*presets, *_policies("forecast", grid)]


def _grid(text: str) -> list[Method]:
    name, _, settings = text.partition(":")
    pairs = read_settings([piece for piece in settings.split(",") if piece], f"--policy {name}:")
    grid = {key: _values(key, value) for key, value in pairs.items()}
    combinations = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return _policies(name.strip(), combinations)


def _values(key: str, value: Any) -> list[Any]:
    if not isinstance(value, str) or "|" not in value:
        return [value]
    return [read_settings([f"{key}={piece}"])[key] for piece in value.split("|")]


def _policies(name: str, grid: Iterable[dict[str, Any]]) -> list[Method]:
    found = []
    for settings in grid:
        policy = get_policy(name, **settings)
        kind = "baseline" if name == HOLD else "ours" if policy.source == "own" else "published"
        setting = ", ".join(f"{key}={value}" for key, value in settings.items())
        found.append(Method(family=name, kind=kind, setting=setting, policy=policy))
    return found

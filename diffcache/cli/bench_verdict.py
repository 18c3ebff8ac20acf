"""Who is faster at equal quality: each family's front, and ours against the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .bench_methods import FEWER, HOLD
from .bench_table import Point, Row

QUALITIES = (36.0, 40.0)  # dB, mean over clips, at which families are compared
OURS = "diffcache"
Families = dict[str, list[Row]]
GROUPS: dict[str, Callable[[Row], bool]] = {
    "block-gating peers": lambda row: row["kind"] == "peer" and row["block_gating"],
    "peers of any kind": lambda row: row["kind"] == "peer",
    "fewer steps": lambda row: row["family"] == FEWER,
    "plain hold": lambda row: row["family"] == HOLD,
    "published policies": lambda row: row["kind"] == "published",
}


def front(points: Iterable[Point]) -> list[Point]:
    """The points that no other beats in both, from fast and poor to slow and good."""
    kept: list[Point] = []
    for point in sorted(points, reverse=True):
        if not math.isnan(point[1]) and (not kept or point[1] > kept[-1][1]):
            kept.append(point)
    return kept


def at_quality(points: Iterable[Point], quality: float) -> tuple[float, bool] | None:
    """The speed-up at which a front falls to a quality, and whether it is a lower bound.

    Linear between the two points around `quality`. A lower bound: even the fastest setting is
    better than that. None: no setting reaches it.
    """
    edge = front(points)
    good = [point for point in edge if point[1] >= quality]
    if not good:
        return None
    slow, high = good[0]
    if good[0] == edge[0] or math.isinf(high):
        return slow, good[0] == edge[0]
    fast, low = edge[len(edge) - len(good) - 1]
    return slow + (high - quality) / (high - low) * (fast - slow), False


def verdicts(found: Sequence[Row], clock: str) -> list[dict[str, Any]]:
    """At each condition and quality: the best speed-up of ours, of each family and each group."""
    result = []
    for scheduler, steps in dict.fromkeys((r["scheduler"], r["steps"]) for r in found):
        here = [r for r in found if (r["scheduler"], r["steps"]) == (scheduler, steps)]
        for quality in QUALITIES:
            where = {"scheduler": scheduler, "steps": steps, "quality": quality}
            result.append({**where, "clock": clock, **_verdict(here, quality, clock)})
    return result


def _verdict(found: Sequence[Row], quality: float, clock: str) -> dict[str, Any]:
    own = _reached([r for r in found if r["kind"] == "ours"], quality, clock)
    names = dict.fromkeys(r["family"] for r in found if r["kind"] != "ours")
    families = {
        name: _reached([r for r in found if r["family"] == name], quality, clock) for name in names
    }
    against = {}
    for group, belongs in GROUPS.items():
        members = {r["family"] for r in found if belongs(r)}
        reached = {name: speed for name, speed in families.items() if name in members and speed}
        best = max(reached, key=lambda name: reached[name]["speedup"], default=None)
        if members:
            against[group] = _compared(own, best, reached.get(best or ""))
    return {"ours": own, "families": families, "against": against}


def _reached(found: Sequence[Row], quality: float, clock: str) -> dict[str, Any] | None:
    best = at_quality([(r[clock], r["psnr_mean"]) for r in found], quality)
    return None if best is None else {"speedup": best[0], "at_least": best[1]}


def _compared(
    own: dict[str, Any] | None, name: str | None, other: dict[str, Any] | None
) -> dict[str, Any]:
    """Our speed-up over the best of a group; no ratio where one side does not reach the quality."""
    ratio = own["speedup"] / other["speedup"] if own and other else None
    return {"best": name, **(other or {"speedup": None, "at_least": False}), "ratio": ratio}


def sentences(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The verdicts for people, those that we lose included."""
    for verdict in found:
        own = verdict["ours"]
        yield (
            f"{verdict['scheduler'] or 'own scheduler'}, {verdict['steps']} steps, "
            f"{verdict['quality']:g} dB in the mean (clips: {verdict['clips']}): {OURS} "
            f"{_speed(own)}"
        )
        for group, other in verdict["against"].items():
            yield f"  {group}: {_outcome(own, other)}"


def _outcome(own: dict[str, Any] | None, other: dict[str, Any]) -> str:
    if other["best"] is None:
        return "none reaches it"
    best = f"{other['best']} {_speed(other)}"
    if own is None:
        return f"BEATEN by {best}"
    word = "BEATEN by" if other["ratio"] < 1 else "ahead of"
    return f"{word} {best}: {other['ratio']:.2f} times its speed-up"


def _speed(reached: dict[str, Any] | None) -> str:
    if reached is None:
        return "does not reach it"
    return f"{'at least ' if reached['at_least'] else ''}{reached['speedup']:.2f}x"

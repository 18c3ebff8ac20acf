"""Arguments of a rolling cache's calls, looked at before anything is touched."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from .positions import Positions
from .ring import EMPTY, Ring
from .settings import RollingSettings


def whole(name: str, value: Any) -> int:
    """`value` as an int, whatever counts as one; True and 1.0 do not."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except (TypeError, RuntimeError):  # a tensor of several numbers, or of floats
            pass
    raise ValueError(f"{name} must be an integer, got {value!r}")


def wholes(name: str, values: Iterable[Any]) -> list[int]:
    if not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a sequence of integers, got {values!r}")
    return [whole(f"each of {name}", value) for value in values]


def check_layer(made: RollingSettings, layer: int) -> int:
    chosen = whole("layer", layer)
    if not 0 <= chosen < made.num_layers:
        raise ValueError(f"layer must be one of 0 to {made.num_layers - 1}, got {layer}")
    return chosen


def check_count(count: int) -> int:
    chosen = whole("count", count)
    if chosen < 1:
        raise ValueError(f"a chunk has at least one frame, got {count}")
    return chosen


def batch_items(made: RollingSettings, items: Sequence[int] | None) -> list[int]:
    """The batch items meant; None for all."""
    chosen = list(range(made.batch_size)) if items is None else wholes("items", items)
    known = set(chosen) <= set(range(made.batch_size))
    if not chosen or len(set(chosen)) < len(chosen) or not known:
        raise ValueError(
            f"items must be different ones of 0 to {made.batch_size - 1}, got {chosen}"
        )
    return chosen


def chunk_frames(made: RollingSettings, keys: Tensor, values: Tensor, items: int) -> int:
    """How many frames a chunk holds: keys and values [items, frames * tokens, heads, head_dim]."""
    wanted = f"[{items}, frames * {made.frame_tokens}, {made.num_heads}, {made.head_dim}]"
    for name, given in (("keys", keys), ("values", values)):
        if not isinstance(given, Tensor) or not given.is_floating_point():
            kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
            raise ValueError(f"{name} must be a tensor of a floating type, got {kind}")
        shape = tuple(given.shape)
        fits = len(shape) == 4 and shape == keys.shape
        fits = fits and (shape[0], *shape[2:]) == (items, made.num_heads, made.head_dim)
        if not fits or not shape[1] or shape[1] % made.frame_tokens:
            raise ValueError(f"{name} must be {wanted}, got {list(shape)}")
    return keys.shape[1] // made.frame_tokens


def check_state(made: RollingSettings, state: Any, form: int) -> None:
    """The outer form of a `state_dict`, and that its settings are these."""
    if not isinstance(state, dict) or state.get("format") != form:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise ValueError(f"format must be {form}, got {found!r}")
    if not isinstance(state.get("settings"), dict):
        raise ValueError("the state has no settings: it is damaged")
    mine, theirs = made.to_dict(), state["settings"]
    names = [name for name in (mine | theirs) if name != "device"]
    differ = [name for name in names if mine.get(name) != theirs.get(name)]
    if differ:
        wanted = ", ".join(f"{name}={theirs.get(name)!r}" for name in differ)
        raise ValueError(f"the state needs a cache with {wanted}")
    for name in ("numbers", "layers"):
        rows = state.get(name)
        if not isinstance(rows, list | tuple) or len(rows) != made.num_layers:
            raise ValueError(f"{name} of the state must have {made.num_layers} rows: it is damaged")


def check_numbers(made: RollingSettings, rings: list[Ring], row: Any) -> None:
    """That rings like these could have given the numbers of one layer of a `state_dict`."""
    if not isinstance(row, list | tuple) or len(row) != len(rings):
        raise ValueError(f"numbers of a layer must be of {len(rings)} items: the state is damaged")
    for ring, numbers in zip(rings, row, strict=True):
        if not _could_be(ring, numbers, made.mode is Positions.RECOMPUTE):
            raise ValueError(f"a layer can never have had {numbers}: the state is damaged")


def _could_be(ring: Ring, numbers: Any, recompute: bool) -> bool:
    if not isinstance(numbers, dict) or set(numbers) != set(ring.numbers()):
        return False
    frames, end, stale = numbers["frames"], numbers["end"], numbers["stale"]
    if not isinstance(frames, list | tuple) or not isinstance(stale, list | tuple):
        return False
    if any(type(number) is not int for number in (*frames, end, *stale)):
        return False
    held = [frame for frame in frames if frame != EMPTY]
    if len(frames) != len(ring.frames) or end < 0 or sorted(held) != ring.scope.kept(end):
        return False
    near = {frame for frame in frames[: ring.device_slots] if frame != EMPTY}
    return near == ring.near(held) and set(stale) <= (set(held) if recompute else set())

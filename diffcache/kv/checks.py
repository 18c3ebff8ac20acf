"""Arguments of a rolling cache's calls, looked at before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .settings import RollingSettings


def check_layer(made: RollingSettings, layer: int) -> None:
    if not 0 <= layer < made.num_layers:
        raise ValueError(f"layer must be one of 0 to {made.num_layers - 1}, got {layer}")


def batch_items(made: RollingSettings, items: Sequence[int] | None) -> list[int]:
    """The batch items meant; None for all."""
    chosen = list(range(made.batch_size)) if items is None else list(items)
    known = set(chosen) <= set(range(made.batch_size))
    if not chosen or len(set(chosen)) < len(chosen) or not known:
        raise ValueError(
            f"items must be different ones of 0 to {made.batch_size - 1}, got {chosen}"
        )
    return chosen


def chunk_frames(made: RollingSettings, keys: Tensor, values: Tensor, items: int) -> int:
    """How many frames a chunk holds: keys and values [items, frames * tokens, heads, head_dim]."""
    wanted = f"[{items}, frames * {made.frame_tokens}, {made.num_heads}, {made.head_dim}]"
    for name, shape in (("keys", tuple(keys.shape)), ("values", tuple(values.shape))):
        fits = len(shape) == 4 and shape == keys.shape
        fits = fits and (shape[0], *shape[2:]) == (items, made.num_heads, made.head_dim)
        if not fits or not shape[1] or shape[1] % made.frame_tokens:
            raise ValueError(f"{name} must be {wanted}, got {list(shape)}")
    return keys.shape[1] // made.frame_tokens

"""What eight-bit storage would do to the frames that a cache holds, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from .codec import SCALED, storage_error


@dataclass(frozen=True, kw_only=True)
class StorageError:
    """One layer in one form of storage.

    Attributes:
        layer, storage: which layer, and "int8" or "float8_e4m3".
        keys, values: root mean square of the error over that of what bfloat16 holds.
    """

    layer: int
    storage: str
    keys: float
    values: float


def report(layers: Iterable[tuple[int, Tensor, Tensor]]) -> list[StorageError]:
    """Rows for each (layer, keys, values), both [..., head_dim], in each scaled form."""
    return [
        StorageError(
            layer=layer,
            storage=storage,
            keys=storage_error(keys, storage),
            values=storage_error(values, storage),
        )
        for layer, keys, values in layers
        for storage in SCALED
    ]

"""Bytes that a cache really holds: those of its tensors' memory, each piece of it once."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory behind the tensors: views count with all that they keep alive."""
    pieces = {}
    alive = list(tensors)  # all at once: memory that one gives up is not another's
    for tensor in alive:
        storage = tensor.untyped_storage()
        pieces[(str(tensor.device), storage.data_ptr(), storage.nbytes())] = storage.nbytes()
    return sum(pieces.values())

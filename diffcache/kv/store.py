"""The memory of one layer: keys and values in slots of one frame each, allocated once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .codec import SCALED, decode, encode, storage_dtype

Slot = tuple[int, int]  # batch item, slot
Raw = dict[str, Tensor]  # keys and values in their stored form, and their scales


class SlotStore:
    """Keys and values [batch, slots, frame_tokens, heads, head_dim] in their stored form.

    A write touches one slot and nothing else; a read of slots that lie in a row is a view.
    """

    def __init__(
        self, shape: tuple[int, int, int, int, int], storage: str, device: torch.device | str
    ) -> None:
        self.storage = storage
        self.bytes_written = 0
        # Tensors born in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self.parts = {
                name: torch.zeros(shape, dtype=storage_dtype(storage), device=device)
                for name in ("keys", "values")
            }
            if storage in SCALED:
                scales = (*shape[:-1], 1)
                for name in ("keys", "values"):
                    self.parts[f"{name}_scale"] = torch.zeros(scales, device=device)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def encode(self, keys: Tensor, values: Tensor) -> Raw:
        """Keys and values [..., heads, head_dim] in the stored form, not yet written."""
        raw = {}
        for name, tensor in (("keys", keys), ("values", values)):
            raw[name], scale = encode(tensor.detach(), self.storage)
            if scale is not None:
                raw[f"{name}_scale"] = scale
        return raw

    def put(self, slot: Slot, raw: Raw) -> None:
        """Writes one frame in its stored form [frame_tokens, heads, ...] into `slot`."""
        item, place = slot
        for name, part in raw.items():
            self.parts[name][item, place].copy_(part)
            self.bytes_written += self.parts[name][item, place].nbytes

    def take(self, slot: Slot) -> Raw:
        """A copy of what lies in `slot`, in its stored form."""
        item, place = slot
        return {name: part[item, place].clone() for name, part in self.parts.items()}

    def read(
        self, items: Sequence[int], slots: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [items, slots * frame_tokens, heads, head_dim] as `dtype`.

        Args:
            slots: for each item the slots wanted, as many for each; -1 reads as zeros.
        """
        found = {name: _gather(part, items, slots) for name, part in self.parts.items()}
        keys = decode(found["keys"], found.get("keys_scale"), dtype)
        values = decode(found["values"], found.get("values_scale"), dtype)
        return keys.flatten(1, 2), values.flatten(1, 2)


def _gather(part: Tensor, items: Sequence[int], slots: Sequence[Sequence[int]]) -> Tensor:
    """`part` at the wanted slots: a view where these are the first ones of every item."""
    count = len(slots[0])
    if list(items) == list(range(part.shape[0])) and all(
        list(row) == list(range(count)) for row in slots
    ):
        return part[:, :count]
    if count == 0:
        return part.new_zeros((len(items), 0, *part.shape[2:]))
    # Zeros, not whatever lies in some slot: a NaN there would survive a mask of the logits.
    blank = torch.zeros(part.shape[2:], dtype=part.dtype, device=part.device)
    rows = [
        torch.stack([blank if slot < 0 else part[item, slot] for slot in row])
        for item, row in zip(items, slots, strict=True)
    ]
    return torch.stack(rows)

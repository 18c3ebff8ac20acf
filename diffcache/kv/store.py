"""The memory of one layer: keys and values in slots of one frame each, allocated once.

The first slots lie on the device, the others, where there are any, in the host's memory. Page
summaries lie on the device for all slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .codec import SCALED, decode, encode, storage_dtype
from .pages import SUMMARIES, summarise
from .scopes import Scope
from .settings import RollingSettings

Slot = tuple[int, int]  # batch item, slot
Raw = dict[str, Tensor]  # keys and values in their stored form, their scales and summaries
Wanted = Sequence[Sequence[tuple[int, int]]]  # for each item (slot, page), page 0 being a frame


class SlotStore:
    """Keys and values [batch, slots, frame_tokens, heads, head_dim] in their stored form.

    A write touches one slot and nothing else; a read of the first slots of all items is a view.
    """

    def __init__(self, settings: RollingSettings, scope: Scope) -> None:
        self.settings = settings
        self.device_slots = settings.device_slots(scope)
        self.bytes_written = 0
        pinned = torch.device(settings.device).type == "cuda"
        # Tensors born in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self.parts, self.host = {}, {}
            for name, (tail, dtype) in _forms(settings).items():
                on_device = scope.slots if name in SUMMARIES else self.device_slots
                shape = (settings.batch_size, on_device, *tail)
                self.parts[name] = torch.zeros(shape, dtype=dtype, device=settings.device)
                if on_device < scope.slots:
                    shape = (settings.batch_size, scope.slots - on_device, *tail)
                    self.host[name] = torch.zeros(shape, dtype=dtype, pin_memory=pinned)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values()) + self.host_nbytes

    @property
    def host_nbytes(self) -> int:
        return sum(part.nbytes for part in self.host.values())

    def encode(self, keys: Tensor, values: Tensor) -> Raw:
        """Keys and values [..., heads, head_dim] in the stored form, not yet written.

        They lie on the device and nowhere in the slots, even if they came from a read of these.
        """
        raw = {}
        for name, tensor in (("keys", keys), ("values", values)):
            ours = tensor.clone() if self.holds(tensor) else tensor
            there = ours.detach().to(self.settings.device)
            raw[name], scale = encode(there, self.settings.storage)
            if scale is not None:
                raw[f"{name}_scale"] = scale
        if self.settings.page_tokens is not None:
            # Of the keys as they will be read: rounding must not carry one out of its box.
            read = decode(raw["keys"], raw.get("keys_scale"), self.settings.torch_dtype)
            raw |= summarise(read, self.settings.page_tokens)
        return raw

    def put(self, slot: Slot, raw: Raw) -> None:
        """Writes one frame in its stored form [frame_tokens, heads, ...] into `slot`."""
        for name, part in raw.items():
            place = self._at(name, slot)
            place.copy_(part)
            self.bytes_written += place.nbytes

    def move(self, source: Slot, target: Slot) -> None:
        """Copies one slot into another, which may be in the other tier."""
        self.put(target, {name: self._at(name, source) for name in self.parts})

    def take(self, slot: Slot) -> Raw:
        """A copy of what lies in `slot`, in its stored form."""
        return {name: self._at(name, slot).clone() for name in self.parts}

    def read(self, items: Sequence[int], wanted: Wanted, paged: bool) -> tuple[Tensor, Tensor]:
        """Keys and values [items, tokens, heads, head_dim] of whole slots, or of pages of them.

        Args:
            wanted: for each item (slot, page), as many for each; slot -1 reads as zeros.
        """
        size = self.settings.page_tokens if paged else self.settings.frame_tokens
        assert size is not None
        found = {n: self._gather(n, items, wanted, size) for n in self.parts if n not in SUMMARIES}
        dtype = self.settings.torch_dtype
        keys = decode(found["keys"], found.get("keys_scale"), dtype)
        values = decode(found["values"], found.get("values_scale"), dtype)
        return keys.flatten(1, 2), values.flatten(1, 2)

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` is a view of the slots."""
        held = {part.untyped_storage().data_ptr() for part in self.parts.values()}
        return tensor.untyped_storage().data_ptr() in held

    def summaries(self, items: Sequence[int], wanted: Wanted) -> list[Tensor]:
        """Mean, minimum and maximum [items, pages, heads, head_dim] of whole slots."""
        size = self.parts[SUMMARIES[0]].shape[2]
        return [self._gather(name, items, wanted, size).flatten(1, 2) for name in SUMMARIES]

    def export(self) -> Raw:
        """A copy of all slots, in one tensor for each part."""
        return {
            name: torch.cat([part.to("cpu"), self.host[name]], 1)
            if name in self.host
            else part.clone()
            for name, part in self.parts.items()
        }

    def check(self, exported: Raw) -> None:
        """Raises ValueError unless `export` of a store like this one could have given that."""
        if not isinstance(exported, dict) or set(exported) != set(self.parts):
            raise ValueError(
                f"a layer of the state must have {', '.join(self.parts)}: it is damaged"
            )
        for name, part in self.parts.items():
            slots = part.shape[1] + (self.host[name].shape[1] if name in self.host else 0)
            shape, given = (part.shape[0], slots, *part.shape[2:]), exported[name]
            fits = isinstance(given, Tensor) and tuple(given.shape) == shape
            if not fits or given.dtype != part.dtype or given.is_meta:
                raise ValueError(
                    f"{name} of the state must be a tensor {list(shape)} of {part.dtype}: "
                    "it is damaged"
                )

    def _at(self, name: str, slot: Slot) -> Tensor:
        """What lies in one slot, where it lies."""
        item, place = slot
        on_device = self.parts[name].shape[1]
        if place < on_device:
            return self.parts[name][item, place]
        return self.host[name][item, place - on_device]

    def _gather(self, name: str, items: Sequence[int], wanted: Wanted, size: int) -> Tensor:
        """[items, wanted, size, ...]: a view where the first slots of all items are wanted."""
        part, count = self.parts[name], len(wanted[0])
        first = [(slot, 0) for slot in range(count)]
        if (
            size == part.shape[2]
            and count <= part.shape[1]
            and list(items) == list(range(part.shape[0]))
            and all(list(row) == first for row in wanted)
        ):
            return part[:, :count]
        if count == 0:
            return part.new_zeros((len(items), 0, size, *part.shape[3:]))
        # Zeros, not whatever lies in some slot: a NaN there would survive a mask of the logits.
        blank = part.new_zeros((size, *part.shape[3:]))
        rows = []
        for item, row in zip(items, wanted, strict=True):
            held = [
                self._at(name, (item, slot))[page * size : (page + 1) * size]
                if slot >= 0
                else blank
                for slot, page in row
            ]
            rows.append(torch.stack([x.to(part.device) for x in held]))
        return torch.stack(rows)


def _forms(settings: RollingSettings) -> dict[str, tuple[tuple[int, int, int], torch.dtype]]:
    """The shape of one slot and the type of each part."""
    tokens, heads, dim = settings.frame_tokens, settings.num_heads, settings.head_dim
    forms = {n: ((tokens, heads, dim), storage_dtype(settings.storage)) for n in ("keys", "values")}
    if settings.storage in SCALED:
        forms |= {f"{name}_scale": ((tokens, heads, 1), torch.float32) for name in tuple(forms)}
    if settings.page_tokens is not None:
        pages = tokens // settings.page_tokens
        forms |= {name: ((pages, heads, dim), torch.float32) for name in SUMMARIES}
    return forms

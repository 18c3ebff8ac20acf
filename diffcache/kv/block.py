"""Tokens of one layer in one form: a rectangle, or heads one after the other without holes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .bits import Codec

FILL = {"index": -1}  # what a slot without a token holds; 0 elsewhere


@dataclass(frozen=True, kw_only=True)
class Block:
    """Planes over slots, picked and joined without being decoded.

    Attributes:
        codec: the form of keys and values.
        planes: by name. Of a rectangle: k0, k1, ... and v0, v1, ... (the codec's planes)
            [batch, heads, slots, n]; index int32 [batch, heads or 1, slots], the column of each
            token, -1 for none; where there are any, received and weight fp32 [batch, heads, slots].
            A flat block has [tokens, ...] instead, ordered by row, head, slot.
        lengths: int32 [batch, heads] of a flat block; None for a rectangle.
        holes: whether some slot of the rectangle holds no token.
    """

    codec: Codec
    planes: dict[str, Tensor]
    lengths: Tensor | None = None
    holes: bool = False

    @classmethod
    def of(cls, codec: Codec, keys: Tensor, values: Tensor, **rest: Tensor) -> Block:
        """A rectangle of keys and values [batch, heads, slots, head_dim] and other planes."""
        coded = {"k": codec.encode(keys), "v": codec.encode(values)}
        planes = {f"{x}{n}": plane for x, all_ in coded.items() for n, plane in enumerate(all_)}
        return cls(codec=codec, planes={**{k: owned(v) for k, v in planes.items()}, **rest})

    @property
    def slots(self) -> int:
        """Slots of the rectangle that a read gives."""
        if self.lengths is None:
            return self.planes["index"].shape[2]
        return int(self.lengths.max()) if self.lengths.numel() else 0

    def rectangle(self) -> Block:
        """The same tokens as a rectangle, itself where it is one; heads padded to the longest."""
        if self.lengths is None:
            return self
        lengths = self.lengths.long()
        count = torch.arange(self.slots, device=lengths.device)
        filled = count < lengths[..., None]  # [batch, heads, slots]
        starts = lengths.flatten().cumsum(0).reshape(lengths.shape) - lengths
        places = (starts[..., None] + count).where(filled, 0)
        planes = {
            name: plane[places]
            if plane.shape[0]
            else plane.new_zeros(*places.shape, *plane.shape[1:])
            for name, plane in self.planes.items()
        }
        planes["index"] = planes["index"].masked_fill(~filled, -1)
        return Block(codec=self.codec, planes=planes, holes=not bool(filled.all()))

    def decoded(self, name: str, dtype: torch.dtype) -> Tensor:
        """Keys ("k") or values ("v") of the rectangle: [batch, heads, slots, head_dim]."""
        block = self.rectangle()
        numbers = sorted(n for n in block.planes if n[0] == name and n[1:].isdigit())
        return self.codec.decode(tuple(block.planes[n] for n in numbers), dtype)

    def pick(self, keep: Tensor, flat: bool) -> Block:
        """The slots of the rectangle where `keep`, bool [batch, heads, slots], in their order.

        Heads that keep different numbers leave holes, unless `flat`.
        """
        block = self.rectangle()
        if flat:
            wide = {name: _wide(plane, keep.shape[1]) for name, plane in block.planes.items()}
            planes = {name: plane[keep] for name, plane in wide.items()}
            lengths = keep.sum(-1, dtype=torch.int32)
            return Block(codec=self.codec, planes=planes, lengths=lengths)
        counts = keep.sum(-1)
        longest = int(counts.max())
        holes = bool((counts < longest).any())
        order = (~keep).to(torch.int8).argsort(dim=-1, stable=True)[..., :longest]
        alike = bool((keep == keep[:, :1]).all())
        planes = {name: _gather(plane, order, alike) for name, plane in block.planes.items()}
        if holes:
            filled = torch.arange(longest, device=keep.device) < counts[..., None]
            filled = filled[:, : planes["index"].shape[1]]
            planes["index"] = planes["index"].masked_fill(~filled, -1)
        return Block(codec=self.codec, planes=planes, holes=holes)

    def recoded(self, codec: Codec, dtype: torch.dtype) -> Block:
        """A rectangle in another form; itself in its own."""
        if codec == self.codec:
            return self
        rest = {name: plane for name, plane in self.planes.items() if not name[1:].isdigit()}
        made = Block.of(codec, self.decoded("k", dtype), self.decoded("v", dtype), **rest)
        return Block(codec=codec, planes=made.planes, holes=self.holes)

    def select(self, rows: Tensor) -> Block:
        """These rows of the batch, in this order; rows may repeat."""
        rows = rows.to(self.planes["index"].device)
        if self.lengths is None:
            planes = {name: plane.index_select(0, rows) for name, plane in self.planes.items()}
            return Block(codec=self.codec, planes=planes, holes=self.holes)
        block = self.rectangle()
        planes = {name: plane.index_select(0, rows) for name, plane in block.planes.items()}
        chosen = Block(codec=self.codec, planes=planes, holes=block.holes)
        return chosen.pick(planes["index"] >= 0, flat=True)

    def tensors(self) -> dict[str, Tensor]:
        lengths = {} if self.lengths is None else {"lengths": self.lengths}
        return {**self.planes, **lengths}

    def promised(self, dtype: torch.dtype) -> int:
        """Bytes that this block is meant to hold, from its sizes alone."""
        tokens = self.planes["k0"].shape[:-1].numel()
        sizes = [_head_dim(self.planes[f"{x}0"], self.codec) for x in "kv"]
        each = sum(self.codec.nbytes(size, dtype) for size in sizes)
        each += 4 * sum(name in self.planes for name in ("received", "weight"))
        lengths = 0 if self.lengths is None else 4 * self.lengths.numel()
        return tokens * each + 4 * self.planes["index"].numel() + lengths


def join(first: Block, second: Block) -> Block:
    """Two blocks of one form as one rectangle, slots of the first before those of the second."""
    a, b = first.rectangle(), second.rectangle()
    heads = max(a.planes["k0"].shape[1], a.planes["index"].shape[1])
    names = [*a.planes, *(name for name in b.planes if name not in a.planes)]
    planes = {}
    for name in names:
        pair = [_plane(block, name, heads) for block in (a, b)]
        if pair[0].shape[1] != pair[1].shape[1]:
            pair = [_wide(plane, heads) for plane in pair]
        planes[name] = torch.cat(pair, 2)
    return Block(codec=first.codec, planes=planes, holes=a.holes or b.holes)


def owned(x: Tensor) -> Tensor:
    """`x` in memory of its own size: a slice of something larger would hold all of it."""
    if x.is_contiguous() and x.untyped_storage().nbytes() == x.numel() * x.element_size():
        return x
    if x.untyped_storage().nbytes() == x.numel() * x.element_size():
        return x  # another order of the same numbers
    return x.clone(memory_format=torch.contiguous_format)


def _plane(block: Block, name: str, heads: int) -> Tensor:
    if name in block.planes:
        return block.planes[name]
    index = block.planes["index"]
    shape = (index.shape[0], heads, index.shape[2])
    return torch.full(shape, float(FILL.get(name, 0)), device=index.device)


def _wide(plane: Tensor, heads: int) -> Tensor:
    return plane.expand(-1, heads, *plane.shape[2:]) if plane.shape[1] == 1 else plane


def _gather(plane: Tensor, order: Tensor, alike: bool) -> Tensor:
    """Slots of a plane [batch, heads or 1, slots, ...] in the given order, per head."""
    if plane.shape[1] == 1 and alike:
        order = order[:, :1]
    plane = _wide(plane, order.shape[1])
    if plane.ndim == 4:
        return plane.gather(2, order[..., None].expand(-1, -1, -1, plane.shape[3]))
    return plane.gather(2, order)


def _head_dim(plane: Tensor, codec: Codec) -> int:
    bits = getattr(codec, "bits", None)
    return plane.shape[-1] if bits is None else plane.shape[-1] * 8 // bits

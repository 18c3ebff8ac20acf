"""The tokens of one layer: a coded part, and a tail in full precision that grows."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Storage
from .bits import Codec, Integer
from .block import Block, join
from .plan import Plan

FULL = Codec()
SETTLE = 16  # tokens by which a tail overflows before its oldest are coded


class TokenStore:
    """Keys and values [batch, heads, ...], appended to, read whole, and changed by plans."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.blocks: dict[str, Block] = {}  # "main", "low", "tail", in the order they are read
        self.dtype = torch.float32

    @property
    def heads(self) -> int:
        block = self.blocks["tail"]
        return block.planes["k0"].shape[1]

    @property
    def moves(self) -> bool:
        """Whether tokens are moved from the tail into another form."""
        return self.storage.flat() or self.storage.codec(self.dtype) != FULL

    def append(self, keys: Tensor, values: Tensor, start: int, accumulates: bool) -> None:
        """Adds tokens of columns start, start + 1, ... to the tail, the same for all heads."""
        self.dtype = keys.dtype
        batch, heads, new = keys.shape[:3]
        index = torch.arange(start, start + new, device=keys.device, dtype=torch.int32)
        rest = {"index": index.expand(batch, 1, new).contiguous()}
        if accumulates:
            rest["received"] = torch.zeros(batch, heads, new, device=keys.device)
        block = Block.of(FULL, keys, values, **rest)
        tail = self.blocks.get("tail")
        self.blocks["tail"] = block if tail is None else join(tail, block)

    def read(self) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, heads, slots, head_dim]; may be the stored tensors themselves."""
        blocks = list(self.blocks.values())
        keys = [block.decoded("k", self.dtype) for block in blocks]
        values = [block.decoded("v", self.dtype) for block in blocks]
        if len(blocks) == 1:
            return keys[0], values[0]
        return torch.cat(keys, 2), torch.cat(values, 2)

    def plane(self, name: str) -> Tensor | None:
        """index int64 [batch, heads or 1, slots], or received or weight [batch, heads, slots]."""
        blocks = [block.rectangle() for block in self.blocks.values()]
        if not any(name in block.planes for block in blocks):
            return None
        if len(blocks) == 1:
            plane = blocks[0].planes[name]
        else:
            small = [_side(block, name, self.heads) for block in blocks]
            shared = all(plane.shape[1] == 1 for plane in small)
            wide = small if shared else [p.expand(-1, self.heads, -1) for p in small]
            plane = torch.cat(wide, 2)
        return plane.long() if name == "index" else plane

    @property
    def holes(self) -> bool:
        return any(block.rectangle().holes for block in self.blocks.values())

    def complete(self, columns: int) -> bool:
        """Whether this is every column ever seen, in order, as it came."""
        tail = self.blocks["tail"]
        whole = len(self.blocks) == 1 and tail.slots == columns and not tail.holes
        return whole and tail.planes["index"].shape[1] == 1 and "weight" not in tail.planes

    def counts(self) -> Tensor:
        """int64 [batch, heads or 1]: slots that are filled, padding included."""
        index = self.plane("index")
        assert index is not None
        return (index >= 0).sum(-1)

    def receive(self, attention: Tensor) -> None:
        """Adds fp32 [batch, heads, slots] to what each token received."""
        start = 0
        for name, block in self.blocks.items():
            slots = block.slots
            part = attention[..., start : start + slots]
            start += slots
            plane = block.planes["received"]
            if block.lengths is not None:
                part = part[block.rectangle().planes["index"] >= 0]
            planes = {**block.planes, "received": plane + part}
            self.blocks[name] = Block(
                codec=block.codec, planes=planes, lengths=block.lengths, holes=block.holes
            )

    def execute(self, plan: Plan, edits: tuple[Tensor, Tensor, Tensor] | None = None) -> None:
        """Keeps what the plan keeps; the rest is gone from memory.

        Args:
            edits: where plans merge: bool [batch, heads, slots] of slots that change, and all
                keys and values [batch, heads, slots, head_dim] as they shall be.
        """
        if edits is not None:
            self._rewrite(*edits)
        start = 0
        low: Block | None = None
        for name, block in list(self.blocks.items()):
            rows = slice(start, start + block.slots)
            start += block.slots
            if plan.low is not None and bool(plan.low[..., rows].any()):
                small = block.pick(plan.low[..., rows], flat=False)
                small = small.recoded(Integer(bits=plan.bits, block=plan.block), self.dtype)
                low = small if low is None else join(low, small)
            self.blocks[name] = block.pick(plan.keep[..., rows], flat=block.lengths is not None)
        if low is not None:
            before = self.blocks.get("low")
            low = low if before is None else join(before, low)
            kept = low.planes["index"] >= 0
            low = low.pick(kept.expand(-1, self.heads, -1), flat=self.storage.flat())
            self.blocks = {**self.blocks, "low": low, "tail": self.blocks["tail"]}
            self.blocks["tail"] = self.blocks.pop("tail")
        self._drop_empty()
        self.settle(force=True)

    def add(self, block: Block) -> None:
        """Adds a rectangle in full precision to the tail."""
        self.blocks["tail"] = join(self.blocks["tail"], block)

    def settle(self, force: bool = False) -> None:
        """Moves what is older than the tail into the coded part, if the storage has one."""
        storage, tail = self.storage, self.blocks["tail"]
        codec = storage.codec(self.dtype)
        if codec == FULL and not storage.flat():
            return
        if codec == FULL and (not force or not tail.holes):
            return  # nothing is gained while all heads hold the same number
        if tail.slots - storage.newest <= (0 if force else SETTLE):
            return
        filled = (tail.planes["index"] >= 0).expand(-1, self.heads, -1)
        newer = filled.flip(-1).cumsum(-1).flip(-1)  # itself included; holes may lie anywhere
        old = filled & (newer > storage.newest)
        moved = tail.pick(old, flat=False).recoded(codec, self.dtype)
        self.blocks["tail"] = tail.pick(filled & ~old, flat=False)
        main = self.blocks.pop("main", None)
        joined = moved if main is None else join(main, moved)
        filled = (joined.planes["index"] >= 0).expand(-1, self.heads, -1)
        if storage.flat() and joined.holes:
            joined = joined.pick(filled, flat=True)
        self.blocks = {"main": joined, **self.blocks}

    def crop(self, columns: int) -> None:
        """Forgets every token of a column from `columns` on."""
        for name, block in list(self.blocks.items()):
            index = block.rectangle().planes["index"].expand(-1, self.heads, -1)
            keep = (index >= 0) & (index < columns)
            if not bool((keep == (index >= 0)).all()):
                self.blocks[name] = block.pick(keep, flat=block.lengths is not None)
        self._drop_empty()

    def select(self, rows: Tensor) -> None:
        """These rows of the batch, in this order."""
        self.blocks = {name: block.select(rows) for name, block in self.blocks.items()}

    def tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}.{plane}": tensor
            for name, block in self.blocks.items()
            for plane, tensor in block.tensors().items()
        }

    def promised(self) -> int:
        """Bytes held, counted from sizes alone; the ledger compares them with the tensors."""
        return sum(block.promised(self.dtype) for block in self.blocks.values())

    def _rewrite(self, changed: Tensor, keys: Tensor, values: Tensor) -> None:
        start = 0
        for name, block in list(self.blocks.items()):
            rows = slice(start, start + block.slots)
            start += block.slots
            here = changed[..., rows]
            if not bool(here.any()):
                continue
            old = block.rectangle()
            new = Block.of(block.codec, keys[..., rows, :], values[..., rows, :])
            planes = {
                plane: tensor.where(here[..., None], old.planes[plane])
                for plane, tensor in new.planes.items()
            }
            made = Block(codec=block.codec, planes={**old.planes, **planes}, holes=old.holes)
            if block.lengths is not None:
                made = made.pick((old.planes["index"] >= 0).expand_as(here), flat=True)
            self.blocks[name] = made

    def _drop_empty(self) -> None:
        self.blocks = {n: b for n, b in self.blocks.items() if n == "tail" or b.slots}


def _side(block: Block, name: str, heads: int) -> Tensor:
    if name in block.planes:
        return block.planes[name]
    index = block.planes["index"]
    return torch.zeros(index.shape[0], heads, index.shape[2], device=index.device)

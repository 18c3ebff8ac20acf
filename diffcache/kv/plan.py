"""A plan: what happens to every token of a layer's cache. The storage executes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The fate of each slot of one layer; heads are those that are stored.

    Attributes:
        keep: bool [batch, heads, slots]; slots that stay as they are.
        low: bool of that shape, slots that stay in `bits` bits; never those of `keep`.
        bits, block: 8, 4 or 2, and the size of Hadamard blocks, for `low`.
        into: int64 of that shape, for a slot that is merged the kept slot that takes it up, else
            -1; None where nothing is merged.
        merge_keys: whether keys are averaged with the values, or values alone.
        summary: whether one slot per head is added that stands for all slots that go: the means
            of their keys and values, weighted in the softmax by their number.
    """

    keep: Tensor
    low: Tensor | None = None
    bits: int = 4
    block: int = 64
    into: Tensor | None = None
    merge_keys: bool = True
    summary: bool = False

    @property
    def stays(self) -> Tensor:
        """bool [batch, heads, slots]: slots of which bytes remain."""
        return self.keep if self.low is None else self.keep | self.low

    def fates(self, live: Tensor) -> dict[str, int]:
        """How many of the `live` slots (bool [batch, heads, slots]) meet which fate."""
        gone = live & ~self.stays
        merged = 0 if self.into is None else int((gone & (self.into >= 0)).sum())
        low = 0 if self.low is None else int((self.low & live).sum())
        kept = int((self.keep & live).sum())
        counts = {"kept": kept, "low": low, "merged": merged, "dropped": int(gone.sum()) - merged}
        return {name: count for name, count in counts.items() if count or name == "kept"}

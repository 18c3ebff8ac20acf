"""The slots of all layers, and who must hear of a write before it happens: snapshots, the memo."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from weakref import WeakSet

from torch import Tensor

from .journal import Saved, Snapshot, Where
from .memo import Pair, ReadMemo
from .settings import RollingSettings
from .store import Raw, Slot, SlotStore

Places = Sequence[Sequence[tuple[int, int]]]


class Memory:
    """Stores one per layer, the live snapshots, and reads that are kept for a while.

    Whatever allocates comes before the first write, so running out of memory changes nothing.
    """

    def __init__(self, settings: RollingSettings) -> None:
        self.settings = settings
        self.stores = [SlotStore(settings, scope) for scope in settings.layers]
        self.snapshots: WeakSet[Snapshot] = WeakSet()
        self.memo = ReadMemo()
        self._saved: WeakSet[Saved] = WeakSet()

    @property
    def nbytes(self) -> int:
        slots = sum(store.nbytes for store in self.stores)
        return slots + sum(saved.nbytes for saved in self._saved) + self.memo.nbytes

    def read(self, layer: int, items: list[int], places: Places, paged: bool) -> Pair:
        """As `SlotStore.read`; whole frames that had to be copied are kept by the memo."""
        store = self.stores[layer]

        def load() -> tuple[Pair, bool]:
            pair = store.read(items, places, paged)
            return pair, not store.holds(pair[0])

        if paged:
            return load()[0]
        return self.memo.read(layer, (tuple(items), tuple(map(tuple, places))), load)

    def write(
        self,
        layer: int,
        items: Sequence[int],
        places: Places,
        keys: Tensor,
        values: Tensor,
        moves: Sequence[tuple[Slot, Slot]] = (),
    ) -> None:
        """Makes the moves, then writes frame n of the chunk for each (n, slot) of each item."""
        if not any(places):
            return  # a frame only moves to make room for one that is written
        shape = (len(items), -1, self.settings.frame_tokens, *keys.shape[2:])
        raw = self.stores[layer].encode(keys.reshape(shape), values.reshape(shape))
        wanted = [
            (row, n, (item, slot)) for row, item in enumerate(items) for n, slot in places[row]
        ]
        for target in [*(target for _, target in moves), *(slot for _, _, slot in wanted)]:
            self._save((layer, *target))
        self.memo.drop(layer)
        for source, target in moves:
            self.stores[layer].move(source, target)
        for row, n, slot in wanted:
            part = {name: tensor[row, n] for name, tensor in raw.items()}
            self.stores[layer].put(slot, part)

    def put(self, slots: Iterable[tuple[Where, Raw]]) -> None:
        """Writes whole slots in their stored form."""
        chosen = list(slots)
        for where, _ in chosen:
            self._save(where)
        for (layer, item, slot), raw in chosen:
            self.memo.drop(layer)
            self.stores[layer].put((item, slot), raw)

    def wanted(self, where: Where) -> bool:
        """Whether a live snapshot will save what lies there before it is overwritten."""
        return any(snapshot.wants(where) for snapshot in self.snapshots)

    def _save(self, where: Where) -> None:
        """Lets every live snapshot that wants it keep what lies there, in one copy for all."""
        layer, item, slot = where
        wanting = [snapshot for snapshot in self.snapshots if snapshot.wants(where)]
        if wanting:
            saved = Saved(self.stores[layer].take((item, slot)))
            self._saved.add(saved)
            for snapshot in wanting:
                snapshot.saved[where] = saved

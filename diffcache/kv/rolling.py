"""A key and value cache that rolls for ever: sinks, a window, true positions, bytes to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor

from .checks import batch_items, check_layer, chunk_frames
from .journal import Snapshot, Where, raw_nbytes
from .pages import PageView
from .positions import Positions, refusal
from .ring import EMPTY, Ring
from .settings import RollingSettings
from .store import Raw, Slot, SlotStore
from .view import Entries, KVView, entries, real

FORMAT = 1


class RollingCache:
    """Keys and values of the last frames and of the sinks, for every layer and batch item.

    For each chunk: every denoising pass calls `read` in each layer and attends to what it gives
    and to the chunk's own keys; the clean pass does so too and calls `append` in each layer. Keys
    come in unrotated (in time; a spatial rotation may be in them) and are rotated when they are
    read, at the positions that the mode names. Evicting a frame moves no other.

    Args:
        sink_size, window_size: frames kept from the start, and from the end.
        settings: the other fields of `RollingSettings`.

    Raises:
        ValueError: settings out of range; a chunk of the wrong shape; a chunk beyond the rotary
            table, before anything was written (`positions.refusal` states the rule of each mode).

    Source: Self-Forcing, arXiv 2506.08009, whose cache shifts its window by copying.
    """

    def __init__(self, sink_size: int, window_size: int, **settings: Any) -> None:
        self.settings = RollingSettings(sink_size=sink_size, window_size=window_size, **settings)
        made = self.settings
        self._token = object()
        self._span, self._mode = made.span, made.mode
        self._rings = [
            [
                Ring(scope, [EMPTY] * scope.slots, made.device_slots(scope))
                for _ in range(made.batch_size)
            ]
            for scope in made.layers
        ]
        self._stores = [SlotStore(made, scope) for scope in made.layers]
        self._snapshots: WeakSet[Snapshot] = WeakSet()

    @property
    def nbytes(self) -> int:
        """Bytes held: the slots of all layers, and what live snapshots saved."""
        saved = {id(raw): raw for each in self._snapshots for raw in each.saved.values()}
        return sum(store.nbytes for store in self._stores) + sum(map(raw_nbytes, saved.values()))

    @property
    def host_nbytes(self) -> int:
        """Those of the bytes held that lie in the host's memory, behind `device_size`."""
        return sum(store.host_nbytes for store in self._stores)

    @property
    def bytes_written(self) -> int:
        """Bytes that were ever written into slots; what a chunk adds is the chunk's own."""
        return sum(store.bytes_written for store in self._stores)

    def frames(self, layer: int, item: int = 0) -> list[int]:
        """True numbers of the frames that a layer keeps, in order of time."""
        return sorted(self._rings[layer][item].held())

    def on_host(self, layer: int, item: int = 0) -> list[int]:
        """Those of the frames kept that lie in the host's memory, in order of time."""
        ring = self._rings[layer][item]
        return sorted(f for f in ring.frames[ring.device_slots :] if f != EMPTY)

    def next_frame(self, layer: int = 0, item: int = 0) -> int:
        """The true number of the frame that comes next."""
        return self._rings[layer][item].end

    def stale(self, layer: int = 0, item: int = 0) -> list[int]:
        """Frames that must be written again before a read (mode RECOMPUTE), in order of time."""
        return sorted(self._rings[layer][item].stale)

    def check_room(self, count: int, items: Sequence[int] | None = None) -> None:
        """Raises ValueError if a chunk of `count` frames would leave the rotary table."""
        for layer in range(self.settings.num_layers):
            self._check_room(layer, count, batch_items(self.settings, items))

    def read(
        self,
        layer: int,
        count: int,
        items: Sequence[int] | None = None,
        pages: Sequence[Sequence[int]] | None = None,
    ) -> KVView:
        """What a chunk of `count` frames may attend to in a layer, beside itself.

        Args:
            items: batch items, in the order wanted; None for all.
            pages: for each item the pages to read, counted as `summaries` lists them; None for
                whole frames. Frames on the host send over what is read and nothing else.
        """
        chosen, found = self._entries(layer, count, items)
        tokens = self.settings.frame_tokens
        if pages is not None:
            tokens = self._page_tokens()
            found = found.pages(pages, self.settings.frame_tokens // tokens)
        keys, values = self._stores[layer].read(chosen, found.places, paged=pages is not None)
        return KVView(
            keys=keys,
            values=values,
            frames=tuple(map(tuple, found.frames)),
            positions=tuple(map(tuple, found.positions)),
            chunk_positions=tuple(found.chunk_positions),
            mask=real(found.frames, tokens, keys),
        )

    def summaries(self, layer: int, count: int, items: Sequence[int] | None = None) -> PageView:
        """Mean, minimum and maximum of the keys of every page that `read` can give.

        Raises:
            ValueError: the cache was made without page_tokens.
        """
        each = self.settings.frame_tokens // self._page_tokens()
        chosen, frames = self._entries(layer, count, items)
        mean, minimum, maximum = self._stores[layer].summaries(chosen, frames.places)
        pages = frames.pages(None, each)
        return PageView(
            mean=mean,
            minimum=minimum,
            maximum=maximum,
            frames=tuple(map(tuple, pages.frames)),
            positions=tuple(map(tuple, pages.positions)),
            chunk_positions=tuple(pages.chunk_positions),
        )

    def append(
        self, layer: int, keys: Tensor, values: Tensor, items: Sequence[int] | None = None
    ) -> None:
        """Takes in the chunk's keys and values [items, frames * frame_tokens, heads, head_dim].

        Frames that fall out of the layer's scope make room; a frame outside of it is not written.
        """
        check_layer(self.settings, layer)
        chosen = batch_items(self.settings, items)
        count = chunk_frames(self.settings, keys, values, len(chosen))
        self._check_room(layer, count, chosen)
        rings = [self._rings[layer][item] for item in chosen]
        plans = [ring.plan(count) for ring in rings]
        places = [
            [(frame - ring.end, slot) for frame, slot in plan.writes]
            for ring, plan in zip(rings, plans, strict=True)
        ]
        moves = [
            ((item, source), (item, target))
            for item, plan in zip(chosen, plans, strict=True)
            for _, source, target in plan.moves
        ]
        self._write(layer, chosen, places, keys, values, moves)
        for ring, plan in zip(rings, plans, strict=True):
            ring.advance(count, plan, self._mode is Positions.RECOMPUTE)

    def rewrite(
        self,
        layer: int,
        frames: Sequence[int],
        keys: Tensor,
        values: Tensor,
        items: Sequence[int] | None = None,
    ) -> None:
        """Writes frames again where they lie: after a prompt switch, or in mode RECOMPUTE.

        Args:
            frames: their true numbers, in the order of `keys`; one that was never written is
                refused, one that is outside of the layer's scope is left out.
        """
        check_layer(self.settings, layer)
        chosen = batch_items(self.settings, items)
        count = chunk_frames(self.settings, keys, values, len(chosen))
        if count != len(frames) or len(set(frames)) != count:
            raise ValueError(f"keys hold {count} frames, but {list(frames)} were named")
        rings = [self._rings[layer][item] for item in chosen]
        for ring in rings:
            if not all(0 <= frame < ring.end for frame in frames):
                raise ValueError(f"only frames before {ring.end} can be rewritten, got {frames}")
        places = [
            [(n, ring.frames.index(f)) for n, f in enumerate(frames) if f in ring.frames]
            for ring in rings
        ]
        self._write(layer, chosen, places, keys, values)
        for ring in rings:
            ring.stale -= set(frames)

    def clear(self, items: Sequence[int] | None = None) -> None:
        """Forgets all frames of some items (None for all), which begin again at frame 0."""
        for item in batch_items(self.settings, items):
            for layer in self._rings:
                layer[item].clear()

    def snapshot(self) -> Snapshot:
        """This moment, for `rollback`; free now, it grows by what is overwritten while held.

        Snapshots share what they keep: holding one of every chunk costs one frame for each frame
        that was overwritten, however many want it.
        """
        taken = Snapshot(self._token, [[ring.numbers() for ring in row] for row in self._rings])
        self._snapshots.add(taken)
        return taken

    def rollback(self, snapshot: Snapshot) -> None:
        """Goes back to that moment, to the bit; the snapshot and others stay good."""
        if snapshot.owner is not self._token:
            raise ValueError("this snapshot is of another cache: roll that one back")
        for where, raw in snapshot.saved.items():
            self._put(where, raw)
        snapshot.saved.clear()
        self._restore(snapshot.numbers)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a new process needs to go on to the same bits; tensors are copies."""
        return {
            "format": FORMAT,
            "settings": self.settings.to_dict(),
            "numbers": [[ring.numbers() for ring in row] for row in self._rings],
            "layers": [store.export() for store in self._stores],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave; the device may be another.

        Raises:
            ValueError: made with other settings, or damaged; nothing was changed then.
        """
        if state.get("format") != FORMAT:
            raise ValueError(f"format must be {FORMAT}, got {state.get('format')!r}")
        mine, theirs = self.settings.to_dict(), dict(state["settings"])
        differ = [name for name in mine if name != "device" and mine[name] != theirs.get(name)]
        if differ:
            wanted = ", ".join(f"{name}={theirs.get(name)!r}" for name in differ)
            raise ValueError(f"the state needs a cache with {wanted}")
        for store, parts in zip(self._stores, state["layers"], strict=True):
            store.check(parts)
        for layer, parts in enumerate(state["layers"]):
            for item, slot in self._all_slots(layer):
                self._put((layer, item, slot), {n: part[item, slot] for n, part in parts.items()})
        self._restore(state["numbers"])

    def _page_tokens(self) -> int:
        if self.settings.page_tokens is None:
            raise ValueError("this cache has no pages: make it with page_tokens")
        return self.settings.page_tokens

    def _entries(
        self, layer: int, count: int, items: Sequence[int] | None
    ) -> tuple[list[int], Entries]:
        """The items asked for and their frames, if a chunk of `count` frames may read them now."""
        check_layer(self.settings, layer)
        chosen = batch_items(self.settings, items)
        self._check_room(layer, count, chosen)
        rings = [self._rings[layer][item] for item in chosen]
        for item, ring in zip(chosen, rings, strict=True):
            if ring.stale:
                raise ValueError(
                    f"frames {sorted(ring.stale)} of item {item} carry evicted context: "
                    f"recompute them without it and `rewrite` them in layer {layer}"
                )
        return chosen, entries(rings, count, self._mode, self._span)

    def _all_slots(self, layer: int) -> list[tuple[int, int]]:
        rings = self._rings[layer]
        return [(item, slot) for item, ring in enumerate(rings) for slot in range(len(ring.frames))]

    def _restore(self, rows: list[list[dict[str, Any]]]) -> None:
        for rings, row in zip(self._rings, rows, strict=True):
            for ring, state in zip(rings, row, strict=True):
                ring.restore(**state)

    def _write(
        self,
        layer: int,
        items: Sequence[int],
        places: list[list[tuple[int, int]]],
        keys: Tensor,
        values: Tensor,
        moves: Sequence[tuple[Slot, Slot]] = (),
    ) -> None:
        """Makes the moves, then writes frame n of the chunk for each (n, slot) of each item."""
        shape = (len(items), -1, self.settings.frame_tokens, *keys.shape[2:])
        # All that allocates comes first: if memory runs out, nothing was written.
        raw = self._stores[layer].encode(keys.reshape(shape), values.reshape(shape))
        wanted = [
            (row, n, (layer, item, slot))
            for row, item in enumerate(items)
            for n, slot in places[row]
        ]
        for _, target in moves:
            self._save((layer, *target))
        for _, _, where in wanted:
            self._save(where)
        for source, target in moves:
            self._stores[layer].move(source, target)
        for row, n, (_, item, slot) in wanted:
            part = {name: tensor[row, n] for name, tensor in raw.items()}
            self._stores[layer].put((item, slot), part)

    def _put(self, where: Where, raw: Raw) -> None:
        self._save(where)
        layer, item, slot = where
        self._stores[layer].put((item, slot), raw)

    def _save(self, where: Where) -> None:
        """Lets every live snapshot keep what lies there."""
        layer, item, slot = where
        wanting = [snapshot for snapshot in self._snapshots if snapshot.wants(where)]
        if wanting:
            raw = self._stores[layer].take((item, slot))  # one copy for all of them
            for snapshot in wanting:
                snapshot.saved[where] = raw

    def _check_room(self, layer: int, count: int, items: Sequence[int]) -> None:
        if count < 1:
            raise ValueError(f"a chunk has at least one frame, got {count}")
        for item in items:
            ring = self._rings[layer][item]
            reason = refusal(self._mode, len(ring.held()), ring.end, count, self._span)
            if reason:
                raise ValueError(reason)

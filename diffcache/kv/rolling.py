"""A key and value cache that rolls for ever: sinks, a window, true positions, bytes to the byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .checks import (
    batch_items,
    check_count,
    check_layer,
    check_numbers,
    check_state,
    chunk_frames,
    wholes,
)
from .codec import FLOATS
from .journal import Snapshot
from .memory import Memory
from .pages import PageView
from .positions import Positions, refusal
from .ring import EMPTY, Ring
from .settings import RollingSettings
from .storage_report import StorageError, report
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
        self._span, self._mode = made.span, made.mode
        self._rings = [
            [
                Ring(scope, [EMPTY] * scope.slots, made.device_slots(scope))
                for _ in range(made.batch_size)
            ]
            for scope in made.layers
        ]
        self._memory = Memory(made)
        self._stores = self._memory.stores

    @property
    def nbytes(self) -> int:
        """Bytes held: the slots of all layers, what live snapshots saved and `decoded` keeps."""
        return self._memory.nbytes

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
        return sorted(self._ring(layer, item).held())

    def on_host(self, layer: int, item: int = 0) -> list[int]:
        """Those of the frames kept that lie in the host's memory, in order of time."""
        ring = self._ring(layer, item)
        return sorted(f for f in ring.frames[ring.device_slots :] if f != EMPTY)

    def next_frame(self, layer: int = 0, item: int = 0) -> int:
        """The true number of the frame that comes next."""
        return self._ring(layer, item).end

    def stale(self, layer: int = 0, item: int = 0) -> list[int]:
        """Frames that must be written again before a read (mode RECOMPUTE), in order of time."""
        return sorted(self._ring(layer, item).stale)

    def check_room(self, count: int, items: Sequence[int] | None = None) -> None:
        """Raises ValueError if a chunk of `count` frames would leave the rotary table."""
        chosen = batch_items(self.settings, items)
        for layer in range(self.settings.num_layers):
            self._check_room(layer, count, chosen)

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
        layer = check_layer(self.settings, layer)
        chosen, found = self._entries(layer, count, items)
        tokens = self.settings.frame_tokens
        if pages is not None:
            tokens = self._page_tokens()
            found = found.pages(pages, self.settings.frame_tokens // tokens)
        keys, values = self._memory.read(layer, chosen, found.places, paged=pages is not None)
        return KVView(
            keys=keys,
            values=values,
            frames=tuple(map(tuple, found.frames)),
            positions=tuple(map(tuple, found.positions)),
            chunk_positions=tuple(found.chunk_positions),
            mask=real(found.frames, tokens, keys),
        )

    @contextmanager
    def decoded(self) -> Iterator[None]:
        """Around the passes of one chunk: what `read` decodes or brings over is kept for the next.

        A layer is let go when it is written, all of them at the end. Until then whole frames take
        their size in `dtype` once more, counted by `nbytes`; reads of pages are not kept.
        """
        self._memory.memo.open()
        try:
            yield
        finally:
            self._memory.memo.close()

    def summaries(self, layer: int, count: int, items: Sequence[int] | None = None) -> PageView:
        """Mean, minimum and maximum of the keys of every page that `read` can give.

        Raises:
            ValueError: the cache was made without page_tokens.
        """
        each = self.settings.frame_tokens // self._page_tokens()
        layer = check_layer(self.settings, layer)
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
        layer = check_layer(self.settings, layer)
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
        self._memory.write(layer, chosen, places, keys, values, moves)
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
        layer = check_layer(self.settings, layer)
        chosen = batch_items(self.settings, items)
        count = chunk_frames(self.settings, keys, values, len(chosen))
        frames = wholes("frames", frames)
        if count != len(frames) or len(set(frames)) != count:
            raise ValueError(f"keys hold {count} frames, but {frames} were named")
        rings = [self._rings[layer][item] for item in chosen]
        for ring in rings:
            if not all(0 <= frame < ring.end for frame in frames):
                raise ValueError(f"only frames before {ring.end} can be rewritten, got {frames}")
        places = [
            [(n, ring.frames.index(f)) for n, f in enumerate(frames) if f in ring.frames]
            for ring in rings
        ]
        self._memory.write(layer, chosen, places, keys, values)
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
        taken = Snapshot([[ring.numbers() for ring in row] for row in self._rings])
        self._memory.snapshots.add(taken)
        return taken

    def snapshot_growth(self, count: int, items: Sequence[int] | None = None) -> int:
        """Bytes that live snapshots will add when all layers take in a chunk of `count` frames.

        Ask before the chunk, and tell the session of a shared pool: `Session.hold`.
        """
        count, chosen = check_count(count), batch_items(self.settings, items)
        saved = 0
        for layer, rings in enumerate(self._rings):
            for item in chosen:
                slots = [slot for _, slot in rings[item].plan(count).placed()]
                saved += sum(self._memory.wanted((layer, item, slot)) for slot in slots)
        return saved * (self.settings.frame_nbytes() + self.settings.summary_nbytes())

    def rollback(self, snapshot: Snapshot) -> None:
        """Goes back to that moment, to the bit; the snapshot and others stay good."""
        if snapshot not in self._memory.snapshots:
            raise ValueError(
                "this snapshot is of another cache, or a copy: roll back with what `snapshot` gave"
            )
        self._memory.put((where, saved.raw) for where, saved in snapshot.saved.items())
        snapshot.saved.clear()
        self._restore(snapshot.numbers)

    def storage_errors(self) -> list[StorageError]:
        """How far int8 and float8_e4m3 would move the frames held now, for each layer that has any.

        Run some chunks with storage="bfloat16", then ask which layers bear eight bits.

        Raises:
            ValueError: the cache stores eight bits already; what it was given is gone.
        """
        if self.settings.storage not in FLOATS:
            raise ValueError(
                f"this cache stores {self.settings.storage}: make one with storage='bfloat16'"
            )
        held = []
        for layer, rings in enumerate(self._rings):
            views = [self._held(layer, item) for item, ring in enumerate(rings) if ring.held()]
            if views:
                keys, values = (torch.cat(parts, dim=1) for parts in zip(*views, strict=True))
                held.append((layer, keys, values))
        return report(held)

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
        check_state(self.settings, state, FORMAT)
        for store, parts in zip(self._stores, state["layers"], strict=True):
            store.check(parts)
        for rings, row in zip(self._rings, state["numbers"], strict=True):
            check_numbers(self.settings, rings, row)
        self._memory.put(
            ((layer, item, slot), {name: part[item, slot] for name, part in parts.items()})
            for layer, parts in enumerate(state["layers"])
            for item, slot in self._all_slots(layer)
        )
        self._restore(state["numbers"])

    def _held(self, layer: int, item: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, frames * frame_tokens, heads, head_dim] of all frames of an item."""
        places = [[(slot, 0) for slot in self._rings[layer][item].slots()]]
        return self._stores[layer].read([item], places, paged=False)

    def _ring(self, layer: int, item: int) -> Ring:
        return self._rings[check_layer(self.settings, layer)][batch_items(self.settings, [item])[0]]

    def _page_tokens(self) -> int:
        if self.settings.page_tokens is None:
            raise ValueError("this cache has no pages: make it with page_tokens")
        return self.settings.page_tokens

    def _entries(
        self, layer: int, count: int, items: Sequence[int] | None
    ) -> tuple[list[int], Entries]:
        """The items asked for and their frames, if a chunk of `count` frames may read them now."""
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

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle is a cache of its own; snapshots stay with the one that took them."""
        return restored, (self.state_dict(),)

    def _all_slots(self, layer: int) -> list[tuple[int, int]]:
        rings = self._rings[layer]
        return [(item, slot) for item, ring in enumerate(rings) for slot in range(len(ring.frames))]

    def _restore(self, rows: list[list[dict[str, Any]]]) -> None:
        for rings, row in zip(self._rings, rows, strict=True):
            for ring, state in zip(rings, row, strict=True):
                ring.restore(**state)

    def _check_room(self, layer: int, count: int, items: Sequence[int]) -> None:
        count = check_count(count)
        for item in items:
            ring = self._rings[layer][item]
            reason = refusal(self._mode, len(ring.held()), ring.end, count, self._span)
            if reason:
                raise ValueError(reason)


def restored(state: dict[str, Any]) -> RollingCache:
    """A new cache that goes on from what `state_dict` gave."""
    cache = RollingCache(**state["settings"])
    cache.load_state_dict(state)
    return cache

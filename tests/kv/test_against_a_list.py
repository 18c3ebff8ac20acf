"""Random caches under random calls, against a list of all that was given."""

from __future__ import annotations

import copy
import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from diffcache.kv import RollingCache
from diffcache.kv.codec import STORAGE, decode, encode
from diffcache.kv.settings import FLOATS

TOKENS, HEADS, DIM = 2, 2, 4
SCOPES = ("none", "sink+window", "window", "sink", "recent_1", "recent_2+anchor", "sink+anchor")
MODES = ("keep", "relative", "anchor", "renumber", "recompute")
CALLS = (
    "append",
    "append",
    "append",
    "rewrite",
    "clear",
    "snapshot",
    "rollback",
    "forget",
    "state",
)
CALLS += ("copy", "decoded")


@dataclass
class Frames:
    """All frames of one item of one layer, as they are stored; which ones must be rewritten."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    stale: set[int] = field(default_factory=set)


class Model:
    """What a cache of some random settings should hold, and the cache."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        sink, mode = rng.randrange(4), rng.choice(MODES)
        layers = rng.randrange(1, 4)
        scopes = [rng.choice(SCOPES) for _ in range(layers)]
        self.settings: dict[str, Any] = {
            "sink_size": sink,
            "window_size": rng.randrange(5),
            "num_layers": layers,
            "num_heads": HEADS,
            "head_dim": DIM,
            "frame_tokens": TOKENS,
            "batch_size": rng.randrange(1, 4),
            "positions": mode,
            "scopes": scopes[:1] * layers if mode == "recompute" else scopes,
            "storage": rng.choice(STORAGE),
            "dtype": rng.choice(list(FLOATS)),
            "max_position": 40 if mode == "renumber" else None,
            "device_size": rng.choice([None, sink + 1, sink + 2]),
            "page_tokens": rng.choice([None, 1, 2]),
        }
        self.cache = RollingCache(**self.settings)
        self.rows = [[Frames() for _ in range(self.settings["batch_size"])] for _ in range(layers)]
        self.moments: list[tuple[Any, Any]] = []

    def kept(self, layer: int, frames: Frames) -> list[int]:
        scope = self.cache.settings.layers[layer]
        end = len(frames.keys)
        return [frame for frame in range(end) if scope.keeps(frame, end)]

    def chunk(self, items: int, frames: int) -> tuple[Tensor, Tensor]:
        shape = (2, items, frames * TOKENS, HEADS, DIM)
        keys, values = torch.randn(shape, generator=self.generator)
        return keys, values

    def stored(self, x: Tensor) -> list[Tensor]:
        coded = encode(x, self.settings["storage"])
        return list(decode(*coded, FLOATS[self.settings["dtype"]]).split(TOKENS))

    def append(self, layer: int, items: list[int]) -> None:
        count = self.rng.randrange(1, 7)
        keys, values = self.chunk(len(items), count)
        self.cache.append(layer, keys, values, items=items)
        for row, item in enumerate(items):
            held = self.rows[layer][item]
            before, end = set(self.kept(layer, held)), len(held.keys) + count
            held.keys += self.stored(keys[row])
            held.values += self.stored(values[row])
            now = set(self.kept(layer, held))
            lost = before - now or set(range(end - count, end)) - now
            recompute = self.settings["positions"] == "recompute"
            held.stale = now if recompute and lost else held.stale & now

    def rewrite(self, layer: int, items: list[int]) -> None:
        end = min(len(self.rows[layer][item].keys) for item in items)
        frames = self.rng.sample(range(end), min(end, 3))
        if frames:
            keys, values = self.chunk(len(items), len(frames))
            self.cache.rewrite(layer, frames, keys, values, items=items)
            for row, item in enumerate(items):
                held = self.rows[layer][item]
                held.stale -= set(frames)
                for n, frame in enumerate(frames):
                    held.keys[frame] = self.stored(keys[row])[n]
                    held.values[frame] = self.stored(values[row])[n]

    def other(self, call: str, items: list[int], blocks: ExitStack) -> None:
        if call == "clear":
            self.cache.clear(items)
            for row in self.rows:
                for item in items:
                    row[item] = Frames()
        elif call == "snapshot":
            self.moments.append((self.cache.snapshot(), copy.deepcopy(self.rows)))
        elif call == "rollback" and self.moments:
            snapshot, rows = self.rng.choice(self.moments)
            self.cache.rollback(snapshot)
            self.rows = copy.deepcopy(rows)
        elif call == "forget" and self.moments:
            self.moments.pop(self.rng.randrange(len(self.moments)))
        elif call == "state":
            self.cache.load_state_dict(self.cache.state_dict())
        elif call == "copy":
            blocks.close()
            self.cache, self.moments = copy.deepcopy(self.cache), []
        elif call == "decoded":
            blocks.close() if self.rng.random() < 0.5 else blocks.enter_context(
                self.cache.decoded()
            )

    def check(self, layer: int) -> None:
        cache, rows = self.cache, self.rows[layer]
        if any(held.stale for held in rows):
            assert [set(cache.stale(layer, item)) for item in range(len(rows))] == [
                held.stale for held in rows
            ]
            with pytest.raises(ValueError, match="carry evicted context"):
                cache.read(layer, 1)
            return
        view = cache.read(layer, 1)
        for item, held in enumerate(rows):
            real = [frame for frame in view.frames[item] if frame >= 0]
            assert sorted(real) == self.kept(layer, held) == cache.frames(layer, item)
            for n, frame in enumerate(view.frames[item]):
                at = slice(n * TOKENS, (n + 1) * TOKENS)
                none = torch.zeros(TOKENS, HEADS, DIM)
                keys, values = (
                    (held.keys[frame], held.values[frame]) if frame >= 0 else (none, none)
                )
                assert torch.equal(view.keys[item, at], keys.to(view.keys.dtype))
                assert torch.equal(view.values[item, at], values.to(view.values.dtype))
                assert view.mask is None or view.mask[item, at].all() == (frame >= 0)

    def check_bytes(self) -> None:
        saved = {id(x): x for snapshot, _ in self.moments for x in snapshot.saved.values()}
        expected = sum(part.nbytes for x in saved.values() for part in x.raw.values())
        kept = self.cache._memory.memo.nbytes
        assert self.cache.nbytes == self.cache.settings.nbytes() + expected + kept


@pytest.mark.parametrize("seed", range(40))
def test_any_calls_in_any_order_leave_what_the_list_says(seed: int) -> None:
    model = Model(seed)
    with ExitStack() as blocks:
        for _ in range(30):
            call, layer = model.rng.choice(CALLS), model.rng.randrange(len(model.rows))
            batch = range(model.settings["batch_size"])
            items = model.rng.sample(batch, model.rng.randrange(1, len(batch) + 1))
            if call in ("append", "rewrite"):
                getattr(model, call)(layer, items)
            else:
                model.other(call, items, blocks)
            model.check_bytes()
            for each in range(len(model.rows)):
                model.check(each)
    assert model.cache._memory.memo.nbytes == 0

"""Forms and storages: what is read back, what is held, and that every stored part follows."""

from __future__ import annotations

from typing import Any

import kv_layers
import pytest
import torch
from kv_layers import DIM, HEADS, Stack

from diffcache.kv import held_bytes
from diffcache.kv.base import PARTS, build, discover
from diffcache.kv.bits import Integer, hadamard
from diffcache.kv.budgets import HeadTopK, Uniform
from diffcache.kv.storages import Contiguous, Quantised, Ragged

discover()
STORAGES = {"contiguous": {}, "ragged": {}, "quantised": {"tail": 8}}
COMPRESSORS = list(PARTS["compressor"])


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("block", [0, 16, 64])
def test_integers_read_back_within_half_a_step(bits: int, block: int) -> None:
    x = torch.randn(2, 3, 50, 64, generator=torch.Generator().manual_seed(0))
    codec = Integer(bits=bits, block=block)
    planes = codec.encode(x)
    spread, read = hadamard(x, block), hadamard(codec.decode(planes, torch.float32), block)
    step = (spread.amax(-1) - spread.amin(-1)) / (2**bits - 1)
    # Scale and least value are rounded to fp16, a thousandth each.
    slack = 2e-3 * spread.abs().amax(-1)
    assert bool(((spread - read).abs().amax(-1) <= step / 2 + slack).all())
    assert sum(p[0, 0, 0].numel() * p.element_size() for p in planes) == codec.nbytes(64, x.dtype)


@pytest.mark.parametrize("size", [16, 24, 64, 80, 128])
def test_hadamard_undoes_itself_and_keeps_lengths(size: int) -> None:
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(0))
    turned = hadamard(x, 64)
    assert torch.allclose(hadamard(turned, 64), x, atol=1e-5)
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)


def test_hadamard_halves_the_error_of_outliers() -> None:
    x = torch.randn(200, 64, generator=torch.Generator().manual_seed(0))
    x[:, 3] *= 30
    errors = []
    for block in (0, 64):
        codec = Integer(bits=4, block=block)
        errors.append(float((codec.decode(codec.encode(x), x.dtype) - x).norm()))
    assert errors[1] < errors[0] / 2


def test_numbers_that_cannot_be_coded_read_back_as_nan() -> None:
    x = torch.randn(3, 16)
    x[1, 4] = torch.inf
    read = Integer(block=0).decode(Integer(block=0).encode(x), x.dtype)
    assert not read[1].isfinite().any() and bool(read[[0, 2]].isfinite().all())


def test_constant_tokens_are_coded_exactly() -> None:
    x = torch.full((4, 16), 0.5)
    codec = Integer(bits=2, block=0)
    assert torch.equal(codec.decode(codec.encode(x), x.dtype), x)


def test_ragged_heads_attend_as_heads_with_holes_do_and_hold_less() -> None:
    budget = HeadTopK(keep=0.5, safeguard=0.0)
    stacks = [
        Stack(kv_layers.policy(scorer="key_difference", budget=budget, storage=storage))
        for storage in (Contiguous(), Ragged())
    ]
    for stack in stacks:
        q, k, v = stack.tokens(2, 60)
        k[:, 0, 30:] = k[:, 0, :1]  # heads unlike each other keep different numbers
        stack.run(q, k, v)
    assert torch.equal(stacks[0].kept(), stacks[1].kept())
    counts = stacks[1].kept().sum(-1)
    assert bool((counts[:, 0] != counts[:, 1]).any())
    results = [stack.run(*stack.tokens(2, 3))[0] for stack in stacks]
    assert torch.allclose(*results, atol=1e-6)
    held = [held_bytes(stack.layers[0].tensors().values()) for stack in stacks]
    each = 2 * DIM * 4 + 4
    assert held[1] <= int(counts.sum() + 2 * HEADS * 3) * each + 4 * 2 * HEADS < held[0]


def test_the_newest_tokens_of_a_coded_layer_stay_in_full() -> None:
    stack = Stack(kv_layers.policy(budget=Uniform(keep=1.0), storage=Quantised(tail=8)))
    q, k, v = stack.tokens(1, 40)
    stack.run(q, k, v)
    read = stack.layers[0].store.read()[0]
    assert torch.equal(read[:, :, -8:], k[:, :, -8:])
    assert not torch.equal(read[:, :, :-8], k[:, :, :-8])
    for _ in range(60):
        stack.run(*stack.tokens(1, 1))
        assert 8 <= stack.layers[0].store.blocks["tail"].slots <= 8 + 16


def test_a_token_is_coded_once() -> None:
    """Reading, evicting others and coding newer ones leave a coded token as it is."""
    budget, storage = Uniform(keep=0.9), Quantised(tail=4)
    stack = Stack(kv_layers.policy(budget=budget, storage=storage, scorer="key_difference"))
    stack.run(*stack.tokens(1, 60))
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for _ in range(8):
        main = stack.layers[0].store.blocks["main"].rectangle()
        codes, index = main.planes["k0"], main.planes["index"].expand(-1, HEADS, -1)
        for head in range(HEADS):
            for slot, column in enumerate(index[0, head].tolist()):
                if column >= 0:
                    before = seen.setdefault((head, column), codes[0, head, slot].clone())
                    assert torch.equal(before, codes[0, head, slot])
        stack.run(*stack.tokens(1, 12))


def made(storage: str, compressor: str, **budget: Any) -> Stack:
    parts = {
        "scorer": "key_difference",
        "budget": HeadTopK(safeguard=0.1, **(budget or {"keep": 0.5})),
        "storage": {"kind": storage, **STORAGES[storage]},
        "compressor": compressor,
    }
    return Stack(kv_layers.policy(**parts))


def by_column(stack: Stack) -> list[torch.Tensor]:
    """Keys and values [batch, heads, columns, n] of what is kept, zeros elsewhere."""
    layer, found = stack.layers[0], []
    for x in layer.store.read():
        index = layer.store.plane("index").expand(*x.shape[:3])
        table = torch.zeros(*x.shape[:2], layer.columns + 1, x.shape[3])
        places = index.where(index >= 0, layer.columns)[..., None].expand_as(x)
        found.append(table.scatter(2, places, x)[:, :, : layer.columns])
    return found


@pytest.mark.parametrize("compressor", COMPRESSORS)
@pytest.mark.parametrize("storage", PARTS["storage"])
class TestEveryStoredPartFollows:
    """transformers PR 45510: reorder, crop and select left the quantised part unchanged."""

    def filled(self, storage: str, compressor: str) -> Stack:
        stack = made(storage, compressor)
        stack.run(*stack.tokens(3, 60))
        stack.run(*stack.tokens(3, 5))
        return stack

    def test_select(self, storage: str, compressor: str) -> None:
        stack = self.filled(storage, compressor)
        layer, rows = stack.layers[0], torch.tensor([2, 0])
        before, kept = by_column(stack), stack.kept()
        stack.timeline.select(rows)
        layer.select(rows)
        assert torch.equal(stack.kept(), kept[rows])
        for old, new in zip(before, by_column(stack), strict=True):
            assert torch.equal(new, old[rows])
        for name, tensor in layer.tensors().items():
            rows_held = tensor.shape[0] if not name.startswith(("main", "low")) else 2
            assert rows_held == 2 or tensor.ndim == 1

    def test_crop(self, storage: str, compressor: str) -> None:
        stack = self.filled(storage, compressor)
        kept = stack.kept()
        stack.layers[0].crop(40)
        stack.timeline.truncate(40)
        assert torch.equal(stack.kept(), kept[..., :40])
        stack.run(*stack.tokens(3, 2))

    def test_the_ledger(self, storage: str, compressor: str) -> None:
        stack = self.filled(storage, compressor)
        for new in (1, 1, 4):
            layer = stack.layers[0]
            assert held_bytes(layer.tensors().values()) == layer.nbytes_promised()
            stack.run(*stack.tokens(3, new))

    def test_what_is_read_does_not_depend_on_the_storage(
        self, storage: str, compressor: str
    ) -> None:
        plain, other = made("contiguous", compressor), self.filled(storage, compressor)
        plain.run(*plain.tokens(3, 60))
        plain.run(*plain.tokens(3, 5))
        tokens = plain.tokens(3, 2)
        results = plain.run(*tokens)[0], other.run(*tokens)[0]
        coded = storage == "quantised"
        error = float((results[0] - results[1]).norm() / results[0].norm())
        assert error < (0.15 if coded else 1e-6)


def test_merging_averages_into_the_likest_kept_token() -> None:
    part = build("compressor", "merge")
    protection = {"kind": "boundaries", "sinks": 0, "recent": 0}
    stack = Stack(kv_layers.policy(compressor=part, protection=protection))
    q, k, v = stack.tokens(1, 4)
    k[:, :, 0], k[:, :, 1] = 2 * k[:, :, 3], 2 * k[:, :, 2]  # newer ones stay
    stack.run(q, k, v)
    keys, values = stack.layers[0].store.read()
    assert torch.allclose(values[:, :, 0], (v[:, :, 2] + v[:, :, 1]) / 2)
    assert torch.allclose(values[:, :, 1], (v[:, :, 3] + v[:, :, 0]) / 2)
    assert torch.allclose(keys[:, :, 1], 1.5 * k[:, :, 3])


def test_merging_values_alone_and_below_a_likeness() -> None:
    part = build("compressor", {"kind": "merge", "keys": False, "threshold": 0.99})
    protection = {"kind": "boundaries", "sinks": 0, "recent": 0}
    stack = Stack(kv_layers.policy(compressor=part, protection=protection))
    q, k, v = stack.tokens(1, 4)
    k[:, :, 0] = k[:, :, 3]
    stack.run(q, k, v)
    keys, values = stack.layers[0].store.read()
    assert torch.equal(keys, k[:, :, 2:])
    assert torch.equal(values[:, :, 0], v[:, :, 2])  # nothing was as like it
    assert torch.allclose(values[:, :, 1], (v[:, :, 3] + v[:, :, 0]) / 2)


def test_one_slot_stands_for_alike_tokens_without_error() -> None:
    """The softmax weight of the compensation slot is the number of tokens behind it."""
    protection = {"kind": "boundaries", "sinks": 0, "recent": 0}
    stack = Stack(kv_layers.policy(compressor="compensate", protection=protection))
    full = Stack(kv_layers.policy(budget=Uniform(keep=1.0)))
    keys, values = (x[:, :, :1].expand(-1, -1, 40, -1) for x in stack.tokens(1, 1)[1:])
    for _ in range(3):  # slots that stand for others are taken up by later ones
        queries = stack.tokens(1, 40)[0]
        stack.run(queries, keys, values)
        full.run(queries, keys, values)
        slots = (stack.layers[0].store.plane("index") >= 0).sum(-1)
        assert int(slots.amax()) <= stack.timeline.columns // 2
    q, k, v = stack.tokens(1, 3)
    assert torch.allclose(stack.run(q, k, v)[0], full.run(q, k, v)[0], atol=1e-5)


def test_what_is_not_kept_stays_in_few_bits() -> None:
    stack = Stack(kv_layers.policy(compressor={"kind": "quantise", "bits": 8}))
    q, k, v = stack.tokens(1, 40)
    stack.run(q, k, v)
    layer = stack.layers[0]
    assert bool(stack.kept().all())
    assert layer.store.blocks["low"].slots == 20
    full = 2 * HEADS * 40 * DIM * 4
    assert held_bytes(layer.tensors().values()) < 0.75 * full
    later = stack.tokens(1, 2)
    other = Stack(kv_layers.policy(budget=Uniform(keep=1.0)))
    other.run(q, k, v)
    results = stack.run(*later)[0], other.run(*later)[0]
    assert float((results[0] - results[1]).norm() / results[1].norm()) < 0.02

"""Budgets are kept to the token, whoever shares them; triggers fire when they say."""

from __future__ import annotations

from typing import Any

import kv_layers
import pytest
import torch
from kv_layers import DIM, HEADS, Stack

from diffcache.kv import held_bytes
from diffcache.kv.apportion import apportion
from diffcache.kv.base import PARTS, build, discover

discover()
BARE = {"kind": "boundaries", "sinks": 0, "recent": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    "head_classes": {"retrieval": [[0, 1], [2, 0]], "streaming": 6},
    "cascade": {"window": 8},
}
LAYERS = 4
every_budget = pytest.mark.parametrize("kind", PARTS["budget"])


def stack(kind: str, *, seed: int = 0, storage: Any = "ragged", **amount: Any) -> Stack:
    budget = {"kind": kind, **SETTINGS.get(kind, {}), **amount}
    parts = {"scorer": "key_difference", "budget": budget, "storage": storage}
    return Stack(kv_layers.policy(protection=BARE, **parts), layers=LAYERS, seed=seed)


def counts(made: Stack) -> torch.Tensor:
    """[layers, batch, heads]"""
    return torch.stack([made.kept(n).sum(-1) for n in range(LAYERS)])


@every_budget
@pytest.mark.parametrize("length", [20, 40, 320])
def test_the_layers_together_keep_what_was_said(kind: str, length: int) -> None:
    made = stack(kind, tokens=40)
    made.run(*made.tokens(2, length))
    kept = counts(made).sum((0, 2))
    total = LAYERS * HEADS * min(40, length)
    if kind == "head_classes":  # heads that only stream leave the rest unused where none retrieves
        assert bool((kept <= total).all())
    else:
        assert kept.tolist() == [total, total]


@every_budget
@pytest.mark.parametrize("turns", [(100,), (60, 40), (30, 30, 40)])
def test_a_fraction_is_of_all_tokens_ever_seen(kind: str, turns: tuple[int, ...]) -> None:
    made = stack(kind, keep=0.29)
    for new in turns:
        made.run(*made.tokens(1, new))
    assert int(counts(made).sum()) <= LAYERS * HEADS * 29
    if kind != "head_classes":
        assert int(counts(made).sum()) == LAYERS * HEADS * 29


@every_budget
@pytest.mark.parametrize("storage", ["contiguous", "ragged", {"kind": "quantised", "tail": 8}])
def test_bytes_are_a_promise_that_is_nearly_used_up(kind: str, storage: Any) -> None:
    if storage == "contiguous" and kind in ("head_top_k", "head_classes"):
        return  # refused: see below
    promise = 40_000
    made = stack(kind, storage=storage, bytes=promise)
    made.run(*made.tokens(1, 400))
    tensors = [t for layer in made.layers for t in layer.tensors().values()]
    held = held_bytes([*tensors, *made.timeline.tensors().values()])
    assert held <= promise
    if kind != "head_classes":
        one_more_each = LAYERS * HEADS * (2 * DIM * 4 + 4)
        assert held > promise - 2 * one_more_each


def test_bytes_with_holes_are_refused() -> None:
    budget = {"kind": "head_top_k", "bytes": 1000}
    with pytest.raises(ValueError, match=r"bytes cannot be promised.*storage='ragged'"):
        kv_layers.policy(scorer="key_difference", budget=budget, storage="contiguous")


def test_a_pyramid_falls_in_equal_steps() -> None:
    made = stack("pyramid", tokens=40)
    made.run(*made.tokens(1, 200))
    assert counts(made)[:, 0, 0].tolist() == [78, 52, 28, 2]


def test_a_pyramid_that_is_wider_than_the_prompt_gives_the_rest_on() -> None:
    made = stack("pyramid", keep=0.8)
    made.run(*made.tokens(1, 100))
    layers = counts(made)[:, 0, 0].tolist()
    assert sum(layers) == 320 and layers[0] == 100 and layers == sorted(layers, reverse=True)


def test_layers_with_restless_attention_get_more() -> None:
    made = stack("cascade", tokens=40)
    q, k, v = made.tokens(1, 200)
    made._layer = lambda layer, n, q, k, v, run=made._layer: run(layer, 0, q * (0.05 + n), k, v)
    made.run(q, k, v)
    layers = counts(made)[:, 0, 0].tolist()
    assert len(set(layers)) == LAYERS and sum(layers) == 160


def test_heads_share_by_their_best_tokens_but_none_starves() -> None:
    scores = torch.zeros(1, 2, 50)
    scores[:, 0] = torch.arange(50.0) + 100
    scores[:, 1] = torch.arange(50.0)
    budget = build("budget", {"kind": "head_top_k", "tokens": 20, "safeguard": 0.25})
    assert budget.split(torch.tensor([20]), scores, None).tolist() == [[35, 5]]
    budget = build("budget", {"kind": "head_top_k", "tokens": 20, "safeguard": 1.0})
    assert budget.split(torch.tensor([20]), scores, None).tolist() == [[20, 20]]


def test_retrieval_heads_get_what_streaming_heads_leave() -> None:
    made = stack("head_classes", tokens=40)
    made.run(*made.tokens(1, 200))
    assert counts(made)[:, 0].tolist() == [[6, 74], [6, 6], [74, 6], [6, 6]]


@pytest.mark.parametrize("seed", range(5))
def test_sharing_out_is_exact(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    shares = torch.rand(3, 7, generator=generator)
    limit = torch.randint(0, 30, (3, 7), generator=generator)
    total = torch.tensor([0, 61, 500])
    given = apportion(total, shares, limit)
    assert bool((given <= limit).all()) and bool((given >= 0).all())
    assert torch.equal(given.sum(1), torch.minimum(total, limit.sum(1)))


def test_without_shares_all_are_equal() -> None:
    given = apportion(torch.tensor([9]), torch.zeros(1, 3), torch.full((1, 3), 9))
    assert given.tolist() == [[3, 3, 3]]


@pytest.mark.parametrize("steps", [1, 4])
def test_a_trigger_every_n_steps_keeps_the_size_within_n(steps: int) -> None:
    """kvpress #55, #167."""
    trigger = {"kind": "every_steps", "steps": steps}
    budget = {"kind": "uniform", "tokens": 30}
    made = Stack(kv_layers.policy(scorer="key_norm", budget=budget, trigger=trigger))
    made.run(*made.tokens(1, 50))
    sizes = []
    for _ in range(20):
        made.run(*made.tokens(1, 1))
        sizes.append(int(made.kept().sum(-1).amax()))
    assert max(sizes) <= 30 + steps - 1 and min(sizes) == 30


def test_overflow_waits_for_its_slack() -> None:
    trigger, budget = {"kind": "overflow", "slack": 5}, {"kind": "uniform", "tokens": 30}
    made = Stack(kv_layers.policy(scorer="key_norm", budget=budget, trigger=trigger))
    made.run(*made.tokens(1, 33))
    sizes = []
    for _ in range(12):
        made.run(*made.tokens(1, 1))
        sizes.append(int(made.kept().sum(-1).amax()))
    assert sizes == [34, 35, 30, 31, 32, 33, 34, 35, 30, 31, 32, 33]


def test_after_prefill_leaves_single_tokens_and_short_questions_alone() -> None:
    trigger, budget = {"kind": "after_prefill", "slack": 8}, {"kind": "uniform", "tokens": 30}
    made = Stack(kv_layers.policy(scorer="key_norm", budget=budget, trigger=trigger))
    sizes = []
    for new in (50, 1, 1, 5, 3):
        made.run(*made.tokens(1, new))
        sizes.append(int(made.kept().sum(-1).amax()))
    assert sizes == [30, 31, 32, 37, 30]


def test_the_layers_of_a_cascade_are_compressed_in_the_same_passes() -> None:
    made = stack("cascade", tokens=40)
    for new in (100, 3, 1, 30):
        made.run(*made.tokens(1, new))
        passes = {len(layer.rows) for layer in made.layers}
        assert len(passes) == 1
        assert int(counts(made).sum()) <= LAYERS * HEADS * (40 + (new == 1))

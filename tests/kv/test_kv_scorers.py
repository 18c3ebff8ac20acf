"""Every scorer against a readable reference, and what all of them promise."""

from __future__ import annotations

from typing import Any

import kv_layers
import pytest
import torch
from kv_layers import GROUP, HEADS, SCALING, Stack
from torch import Tensor

from diffcache.kv.base import PARTS, Scorer, build, discover
from diffcache.kv.budgets import Uniform
from diffcache.kv.policy import KVPolicy
from diffcache.kv.scorers.expected_attention import ExpectedAttentionScore

discover()
# Scorers that have nothing to say until they are told what to look at.
SETTINGS: dict[str, dict[str, Any]] = {
    "weighted_sum": {"scorers": ("key_difference", "position"), "weights": (1.0, 0.5)},
    "largest": {"scorers": ("key_norm", "window_attention")},
    "gated": {"scorer": "key_difference", "roles": (2,)},
    "smoothed": {"scorer": "key_difference"},
    "over_heads": {"scorer": "key_difference"},
    "value_weighted": {"scorer": "window_attention"},
}
LENGTH = 40
every_scorer = pytest.mark.parametrize("kind", PARTS["scorer"])


def scorer(kind: str) -> Scorer:
    return build("scorer", {"kind": kind, **SETTINGS.get(kind, {})})


def keeping_all(scorer: Scorer) -> Stack:
    """A stack that measures what the scorer needs, and evicts nothing."""
    return Stack(kv_layers.policy(scorer=scorer, budget=Uniform(keep=1.0)))


def softmaxed(q: Tensor, k: Tensor) -> Tensor:
    """Causal attention [query heads, n, n] of one row, by the book."""
    heads = k.repeat_interleave(GROUP, 0)
    logits = q @ heads.transpose(-1, -2) * SCALING
    n = q.shape[1]
    return logits.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf).softmax(-1)


@every_scorer
def test_scores_are_finite_and_of_the_right_shape(kind: str) -> None:
    stack = keeping_all(scorer(kind))
    seen = kv_layers.view(stack, *stack.tokens(2, LENGTH))
    scores = scorer(kind).score(seen)
    assert scores.shape == (2, HEADS, LENGTH) and bool(scores.isfinite().all())


@every_scorer
def test_the_same_part_serves_two_prompts_in_a_row(kind: str) -> None:
    """kvpress #221: state kept between samples crashed the second one."""
    shared = kv_layers.policy(scorer=scorer(kind))
    runs = []
    for _ in range(2):
        stack = Stack(shared)
        stack.run(*stack.tokens(1, LENGTH))
        runs.append(stack.kept())
    assert torch.equal(*runs)


@every_scorer
def test_a_padded_row_keeps_the_tokens_that_it_keeps_alone(kind: str) -> None:
    alone, both = Stack(kv_layers.policy(scorer=scorer(kind))), None
    tokens = alone.tokens(1, LENGTH)
    alone.run(*tokens)
    both = Stack(kv_layers.policy(scorer=scorer(kind)))
    longer = [torch.cat([torch.randn(1, t.shape[1], 9, t.shape[3]), t], 2) for t in tokens]
    real = torch.ones(1, LENGTH + 9, dtype=torch.bool)
    real[:, :9] = False
    both.run(*longer, real=real)
    assert torch.equal(both.kept()[..., 9:], alone.kept())
    assert not both.kept()[..., :9].any()


@every_scorer
def test_a_token_that_is_not_a_number_does_not_spread(kind: str) -> None:
    stack = Stack(kv_layers.policy(scorer=scorer(kind)))
    tokens = stack.tokens(1, LENGTH)
    tokens[1][0, 0, 20] = torch.nan
    stack.run(*tokens)
    assert int(stack.kept()[0, 1].sum()) == LENGTH // 2


def test_window_attention_is_the_pooled_mean_of_the_last_queries() -> None:
    part = build("scorer", {"kind": "window_attention", "window": 6, "kernel": 3})
    stack = keeping_all(part)
    q, k, v = stack.tokens(1, LENGTH)
    scores = part.score(kv_layers.view(stack, q, k, v))[0]
    mean = softmaxed(q[0], k[0])[:, -6:].mean(1).reshape(HEADS, GROUP, LENGTH).mean(1)
    mean[:, -6:] = 0
    padded = torch.nn.functional.pad(mean, (1, 1))
    pooled = (padded[:, :-2] + padded[:, 1:-1] + padded[:, 2:]) / 3
    assert torch.allclose(scores[:, :-6], pooled[:, :-6], atol=1e-6)
    assert bool((scores[:, -6:] >= scores.amax(-1, keepdim=True)).all())


def test_window_attention_adds_the_variance() -> None:
    part = build("scorer", {"kind": "window_attention", "window": 6, "kernel": 1, "variance": 9.0})
    stack = keeping_all(part)
    q, k, v = stack.tokens(1, LENGTH)
    last = softmaxed(q[0], k[0])[:, -6:]
    each = last.mean(1) + 9 * last.var(1, unbiased=False)
    wanted = each.reshape(HEADS, GROUP, -1).mean(1)
    scores = part.score(kv_layers.view(stack, q, k, v))[0]
    assert torch.allclose(scores[:, :-6], wanted[:, :-6], atol=1e-6)


@pytest.mark.parametrize("passes", [(40,), (10, 25, 1, 1, 3)])
def test_accumulated_attention_sums_over_all_passes(passes: tuple[int, ...]) -> None:
    part = build("scorer", "accumulated_attention")
    stack = keeping_all(part)
    q, k, v = stack.tokens(1, 40)
    start = 0
    for new in passes:
        rows = slice(start, start + new)
        stack.run(q[:, :, rows], k[:, :, rows], v[:, :, rows])
        start += new
    received = stack.layers[0].store.plane("received")[0]
    wanted = softmaxed(q[0], k[0]).sum(1).reshape(HEADS, GROUP, -1).mean(1)
    assert torch.allclose(received, wanted, atol=1e-5)


def test_accumulated_attention_can_be_divided_by_the_queries_that_saw() -> None:
    part = build("scorer", {"kind": "accumulated_attention", "normalise": True})
    stack = keeping_all(part)
    q, k, v = stack.tokens(1, 40)
    scores = part.score(kv_layers.view(stack, q, k, v))[0]
    wanted = softmaxed(q[0], k[0]).sum(1).reshape(HEADS, GROUP, -1).mean(1)
    assert torch.allclose(scores, wanted / torch.arange(40, 0, -1), atol=1e-5)


@pytest.mark.parametrize("eps", [0.0, 0.01])
def test_expected_attention_by_the_book(eps: float) -> None:
    part = ExpectedAttentionScore(future=7, skip=4, eps=eps)
    stack = keeping_all(part)
    q, k, v = stack.tokens(1, LENGTH)
    steps = torch.arange(LENGTH)[None, None]
    rotated = kv_layers.rotate(q, steps), kv_layers.rotate(k, steps)
    scores = part.score(kv_layers.view(stack, *rotated, v))[0]
    eye = torch.eye(kv_layers.DIM)[None, None]
    turns = [
        kv_layers.rotate(eye, torch.full((1, 1, kv_layers.DIM), p))[0, 0] for p in range(40, 47)
    ]
    turn = torch.stack(turns).mean(0)
    for head in range(HEADS):
        shares = []
        for query in q[0, head * GROUP : (head + 1) * GROUP, 4:]:
            mean, spread = query.mean(0) @ turn, turn.T @ query.T.cov(correction=0) @ turn
            keys = rotated[1][0, head]
            logits = keys @ mean * SCALING + ((keys @ spread) * keys).sum(-1) * SCALING**2 / 2
            shares.append(logits.softmax(-1))
        wanted = (torch.stack(shares).mean(0) + eps) * v[0, head].norm(dim=-1)
        assert torch.allclose(scores[head], wanted, atol=1e-5)


def test_key_difference_is_the_cosine_to_the_mean_direction() -> None:
    part = build("scorer", "key_difference")
    stack = keeping_all(part)
    q, k, v = stack.tokens(1, LENGTH)
    scores = part.score(kv_layers.view(stack, q, k, v))[0, 1]
    mean = torch.nn.functional.normalize(k[0, 1], dim=-1).mean(0)
    assert torch.allclose(scores, -torch.nn.functional.cosine_similarity(k[0, 1], mean, dim=-1))


def test_values_weigh_as_they_come_out_of_the_projection() -> None:
    part = build(
        "scorer", {"kind": "value_weighted", "scorer": "accumulated_attention", "eps": 0.1}
    )
    stack = keeping_all(part)
    q, k, v = stack.tokens(1, LENGTH)
    scores = part.score(kv_layers.view(stack, q, k, v))[0]
    weight, received = kv_layers.output_weight(), stack.layers[0].store.plane("received")[0]
    for head in range(HEADS):
        sizes = [(v[0, head] @ weight[head * GROUP + g]).abs().sum(-1) for g in range(GROUP)]
        wanted = (received[head] + 0.1) * torch.stack(sizes).mean(0)
        assert torch.allclose(scores[head], wanted, rtol=1e-5)


def test_roles_fade_at_their_own_rate() -> None:
    part = build(
        "scorer", {"kind": "role_decay", "worth": (1.0, 5.0), "decay": (0.1, 0.0), "refresh": 0.0}
    )
    stack = keeping_all(part)
    tokens = stack.tokens(1, 10)
    roles = torch.tensor([[1, 0] * 5], dtype=torch.int8)
    stack.run(*tokens, roles=roles)
    made = stack.layers[0]
    seen = made._view(tokens[0], made._index(10), *made.store.read(), SCALING)
    age = torch.arange(9, -1, -1)
    wanted = torch.where(roles[0] == 1, torch.tensor(5.0), torch.exp(-0.1 * age))
    assert torch.allclose(part.score(seen)[0, 0], wanted)


def test_gated_roles_go_first() -> None:
    part = build("scorer", {"kind": "gated", "scorer": "position", "roles": [3]})
    stack = Stack(kv_layers.policy(scorer=part, protection={"kind": "boundaries", "recent": 0}))
    roles = torch.zeros(1, 20, dtype=torch.int8)
    roles[:, 10:] = 3
    stack.run(*stack.tokens(1, 20), roles=roles)
    assert stack.kept()[0, 0].tolist() == [True] * 10 + [False] * 10


def test_pinned_roles_stay_whatever_they_score() -> None:
    pinned = {"kind": "boundaries", "sinks": 0, "recent": 0, "roles": [7]}
    stack = Stack(kv_layers.policy(scorer="position", protection=pinned))
    roles = torch.zeros(1, 20, dtype=torch.int8)
    roles[:, 2:5] = 7
    stack.run(*stack.tokens(1, 20), roles=roles)
    assert stack.kept()[0, 0].nonzero().flatten().tolist() == [2, 3, 4, *range(13, 20)]


def test_one_score_for_all_heads() -> None:
    part = build("scorer", {"kind": "over_heads", "scorer": "key_difference", "heads": [1]})
    stack = Stack(kv_layers.policy(scorer=part))
    stack.run(*stack.tokens(1, LENGTH))
    assert torch.equal(stack.kept()[0, 0], stack.kept()[0, 1])
    assert stack.layers[0].store.plane("index").shape[1] == 1  # columns are held once for all


def test_a_new_scorer_is_one_class() -> None:
    """What CONTRIBUTING promises: a file with a class in it; policies and files know it at once."""
    from dataclasses import dataclass

    from diffcache.kv.base import part

    try:

        @part("scorer")
        @dataclass(frozen=True, kw_only=True)
        class OddColumns(Scorer):
            """Odd columns stay."""

            def score(self, view: Any) -> Tensor:
                return (view.index % 2).float().expand(-1, view.stored_heads, -1)

        plain = {"kind": "boundaries", "sinks": 0, "recent": 0}
        made = kv_layers.policy(scorer="odd_columns", protection=plain)
        assert KVPolicy.from_dict(made.to_dict()) == made
        stack = Stack(made)
        stack.run(*stack.tokens(1, 20))
        assert stack.kept()[0, 0].tolist() == [False, True] * 10
    finally:
        PARTS["scorer"].pop("odd_columns", None)

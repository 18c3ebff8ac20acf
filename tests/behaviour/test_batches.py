"""Several clips in one batch: what one of them decides for the others."""

from __future__ import annotations

import pytest
import torch
from toys import COND, TIMES, Bare, latents, lively, rows

import diffcache

ALL = ["hold", "easycache", "first_block", "taylorseer", "balanced"]


def run(module, items):
    """Items of a batch of 3 over 12 steps, each moving at its own pace."""
    x = torch.cat([latents(seed=seed) for seed in range(3)])
    pace = torch.tensor([0.001, 0.01, 0.04]).reshape(3, 1, 1)
    outputs = [module((x * (1 - pace * i))[items], t, COND) for i, t in enumerate(TIMES)]
    return torch.stack(outputs), [row.decision for row in rows(module)]


@pytest.mark.peer_row(11)
@pytest.mark.parametrize("name", ALL)
def test_an_item_alone_and_in_a_batch(name):
    """nunchaku PR #601: item 0 decided for the whole batch.

    Policies that decide per item (tables) give an item the same alone and in a batch, to 1e-5. The
    others say that they decide per batch, and do so by the batch's mean: the order of the items
    makes no difference, and a batch of one clip three times is that clip.
    """
    policy = lively(name).with_settings(
        **({"threshold": 0.2} if "threshold" in settings(name) else {})
    )
    together, decided = run(diffcache.wrap(Bare(), policy), [0, 1, 2])
    turned, decided_turned = run(diffcache.wrap(Bare(), policy), [2, 0, 1])
    assert decided_turned == decided and "reuse" in decided
    torch.testing.assert_close(turned[:, [1, 2, 0]], together, rtol=0, atol=1e-5)
    for item in range(3):
        alone, decided_alone = run(diffcache.wrap(Bare(), policy), [item])
        thrice, decided_thrice = run(diffcache.wrap(Bare(), policy), [item] * 3)
        assert decided_thrice == decided_alone
        torch.testing.assert_close(thrice[:, :1], alone, rtol=0, atol=1e-5)
        if policy.decides == "item":
            assert decided_alone == decided
            torch.testing.assert_close(alone, together[:, item : item + 1], rtol=0, atol=1e-5)


def settings(name):
    return diffcache.get_policy(name).settings()


@pytest.mark.peer_row(11)
def test_which_policies_decide_per_batch():
    """Documented on the policy: a probe, an adaptive predictor or `max_error` couples the items."""
    decides = {name: diffcache.get_policy(name).decides for name in ALL}
    assert decides["hold"] == decides["taylorseer"] == "item"
    assert decides["easycache"] == decides["first_block"] == decides["balanced"] == "batch"
    assert diffcache.get_policy("hold", max_error=0.1).decides == "batch"


@pytest.mark.peer_row(11)
def test_no_item_is_reused_where_another_is_not_finite():
    """A NaN in one clip of the batch makes the whole batch compute: the others are not spoiled."""
    module = diffcache.wrap(Bare(), "first_block", threshold=1e9)
    x = torch.cat([latents(seed=seed) for seed in range(2)])
    for i, t in enumerate(TIMES):
        given = x * (1 - 0.01 * i)
        if i >= 6:
            given[1] = float("nan")
        out = module(given, t, COND)
        assert torch.isfinite(out[0]).all()
    assert {row.decision for row in rows(module)[6:]} == {"compute"}
    assert {row.decision for row in rows(module)[1:6]} == {"reuse"}

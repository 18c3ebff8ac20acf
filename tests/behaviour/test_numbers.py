"""NaN and infinity."""

from __future__ import annotations

import math

import pytest
import torch
from toys import COND, SITES, TIMES, Bare, Block, drive, latents, lively, reused, rows

import diffcache


@pytest.mark.peer_row(29)
def test_nan_is_never_similar(tiny_wan, run_tiny):
    """cache-dit #622: snow and black regions, nobody knew from where.

    From the first NaN on every step is computed, and the report says so.
    """

    def poison(pipe, index, t, tensors):
        if index == 4:
            tensors["latents"] = tensors["latents"] * math.nan
        return tensors

    pipe = diffcache.wrap(tiny_wan(), "first_block", threshold=1e9)
    run_tiny(pipe, callback_on_step_end=poison)
    for branch in ("cond", "uncond"):
        found = rows(pipe, branch)
        assert {row.decision for row in found[1:5]} == {"reuse"}
        assert {row.decision for row in found[5:]} == {"compute"}
        assert all("non-finite" in row.reason for row in found[5:])


@pytest.mark.peer_row(29)
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_not_handed_on(value, site):
    """A model that overflows at one step: that step's output alone is spoiled, in every site."""

    class Overflows(Bare):
        bad = False

        def forward(self, x, t, cond):
            out = super().forward(x, t, cond)
            return out * value if self.bad else out

    module = diffcache.wrap(Overflows(), "hold", site=site, warmup_steps=1, min_steps=0)
    finite = []
    for i, t in enumerate(TIMES):
        module.bad = i == 3
        finite.append(bool(torch.isfinite(module(latents() * (1 - 0.01 * i), t, COND)).all()))
    # A block site sees the blocks alone, which stay finite.
    assert finite[:3] == [True] * 3 and all(finite[4:])
    assert reused(module) > 0


class InPlace(Block):
    """Writes its result into its input."""

    def forward(self, hidden_states, text):
        return hidden_states.copy_(super().forward(hidden_states, text))


@pytest.mark.peer_row(23)
@pytest.mark.parametrize("name", ["easycache", "first_block", "hold", "taylorseer"])
@pytest.mark.parametrize("site", ["stack", "block"])
def test_blocks_that_write_into_their_input_are_cached(site, name):
    """sglang #33827: a block wrote into its input, every difference was NaN, nothing was cached.

    As many steps are skipped as with blocks that do not, with the same outputs.
    """
    front = {"front": 1} if name == "first_block" and site == "stack" else {}
    policy = lively(name, site={"kind": site, **front})
    outputs, decisions = [], []
    for cls in (Block, InPlace):
        module = Bare()
        for i, layer in enumerate(module.layers):
            module.layers[i] = cls()
            module.layers[i].load_state_dict(layer.state_dict())
        module.requires_grad_(False)
        diffcache.wrap(module, policy)
        outputs.append(drive(module, lambda step: [{"cond": COND}]))
        decisions.append([row.decision for row in rows(module)])
        assert reused(module) > 0
        assert all(row.metric is None or math.isfinite(row.metric) for row in rows(module))
    assert decisions[0] == decisions[1]
    for (one,), (two,) in zip(*outputs, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


@pytest.mark.peer_row(29)
def test_a_forecast_that_drifts_is_given_up():
    """The error at each computed step is the probe: above `max_error` all steps are computed."""

    class Jumps(Bare):
        def forward(self, x, t, cond):
            return super().forward(x, t, cond) * (1 if int(t) % 100 else -1)

    calm, wild = (diffcache.wrap(cls(), "hold", max_error=0.5) for cls in (Bare, Jumps))
    for module in (calm, wild):
        drive(module, lambda step: [{"cond": COND}])
    assert reused(calm) > 2 * reused(wild)
    assert "observed error" in diffcache.report(wild).summary["reasons"]

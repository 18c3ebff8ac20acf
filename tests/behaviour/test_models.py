"""Denoisers of other shapes: own modules, two streams, hints, long skips, VACE, UNet."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import UNet2DConditionModel, WanVACETransformer3DModel
from torch import nn
from toys import SITES, TIMES, Base, Layer, OneStream, Own, equal, far, reused, rows, start

import diffcache
from diffcache.api import _states

BLOCK_SITES = SITES[1:]
COND = torch.full((1, 1, 6), 0.3)


class TwoStream(Layer):
    def forward(self, hidden_states, encoder_hidden_states):
        both = torch.cat([hidden_states, encoder_hidden_states], dim=1)
        hidden, encoder = (both + super().forward(both)).split([5, 3], dim=1)
        return hidden, encoder


class TwoStreams(Base):
    """Blocks return (hidden, encoder); both leave the stack and reach the output."""

    block = TwoStream

    def forward(self, hidden_states, timestep, encoder_hidden_states):
        hidden, encoder = hidden_states + timestep / 1000, encoder_hidden_states
        for block in self.blocks:
            hidden, encoder = block(hidden_states=hidden, encoder_hidden_states=encoder)
        return hidden + encoder.mean(1, keepdim=True)


class Hinted(Base):
    """A hint is added after block 1, as VACE and ControlNet do."""

    block = OneStream

    def forward(self, x, t, cond, hint):
        x = x + t / 1000
        for i, block in enumerate(self.blocks):
            x = block(x, cond)
            if i == 1:
                x = x + hint
        return x


class LongSkips(Base):
    """The second half reads what the first half handed on, as HunyuanDiT and U-ViT do."""

    block = OneStream

    def forward(self, x, t, cond):
        kept, x = [], x + t / 1000
        for i, block in enumerate(self.blocks):
            if i >= 2:
                x = x + kept.pop()
            x = block(x, cond)
            if i < 2:
                kept.append(x)
        return x


class SkipBlock(OneStream):
    def forward(self, x, cond, skip=None):
        return super().forward(x if skip is None else x + skip, cond)


class SkipsAsArguments(Base):
    """The same, but the blocks themselves are handed what was kept."""

    block = SkipBlock

    def forward(self, x, t, cond):
        first, x = self.blocks[0], x + t / 1000
        kept = [x := first(x, cond)]
        kept.append(x := self.blocks[1](x, cond))
        for block in self.blocks[2:]:
            x = block(x, cond, kept.pop())
        return x


class ReadsInBetween(Base):
    """The output is made of what every block handed on: no skipped span can give it."""

    block = OneStream

    def forward(self, x, t, cond):
        seen, x = [], x + t / 1000
        for block in self.blocks:
            x = block(x, cond)
            seen.append(x * 2)
        return sum(seen)


def drive(module, times=TIMES, positional=True, **call):
    """An Euler loop over x [1, 5, 6]; the outputs."""
    x, outputs = start(1, 5, 6), []
    for t in times:
        if positional:
            out = module(x, t, *call.values())
        else:
            names = module.__class__.forward.__code__.co_varnames[1:3]
            out = module(**dict(zip(names, (x, t), strict=True)), **call)
        outputs.append(out)
        x = x - out / 40
    return outputs


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("positional", [True, False])
def test_own_module_with_a_plain_list(site, positional):
    """Positional and keyword calls alike: skips, exact when exact, near when not."""
    module, plain = diffcache.wrap(Own(), "hold", site=site), drive(Own(), cond=COND)
    found = drive(module, positional=positional, cond=COND)
    assert reused(module) > 0 and 0 < far(found, plain) < 0.3
    assert equal(drive(module, positional=not positional, cond=COND), found)
    diffcache.wrap(module, "hold", site=site, fraction=1.0)
    assert equal(drive(module, positional=positional, cond=COND), plain)


def test_positional_and_keyword_calls_take_turns():
    """The way of calling changes from step to step: the same outputs."""
    expected = drive(diffcache.wrap(Own(), "hold", site="stack"), cond=COND)
    module = diffcache.wrap(Own(), "hold", site="stack")
    x, outputs = start(1, 5, 6), []
    for i, t in enumerate(TIMES):
        out = module(x, t, COND) if i % 2 else module(cond=COND, t=t, x=x)
        outputs.append(out)
        x = x - out / 40
    assert equal(outputs, expected) and reused(module) > 0


@pytest.mark.parametrize("site", SITES)
def test_two_streams(site):
    """Both streams of (hidden, encoder) blocks are rebuilt."""
    text = start(1, 3, 6)
    module = diffcache.wrap(TwoStreams(), "hold", site=site)
    plain = drive(TwoStreams(), encoder_hidden_states=text)
    assert 0 < far(drive(module, encoder_hidden_states=text), plain) < 0.3
    assert reused(module) > 0
    diffcache.wrap(module, "hold", site=site, fraction=1.0)
    assert equal(drive(module, encoder_hidden_states=text), plain)


def test_a_span_ends_where_a_hint_comes_in():
    """The hint of each step reaches the output of skipped steps too."""
    module = diffcache.wrap(Hinted(), "hold", site="stack", warmup_steps=1, min_steps=0)
    x, hint = start(1, 5, 6), torch.ones(1, 5, 6)
    for i, t in enumerate(TIMES):
        module(x * (1 - 0.01 * i), t, COND, hint)
    assert reused(module) > 0
    (state,) = _states(module)
    assert sorted(key[1] for key in state.cells) == ["blocks 0-2", "blocks 2-4"]


def test_a_changed_hint_is_not_lost():
    """The hint changes under the nose of a cache: the branch is computed anew, or it comes in."""
    module = diffcache.wrap(Hinted(), "hold", site="stack", warmup_steps=1, min_steps=0)
    x, plain = start(1, 5, 6), Hinted()
    for i, t in enumerate(TIMES):
        hint = torch.full((1, 5, 6), float(i))
        out = module(x, t, COND, hint)
        assert (out - plain(x, t, COND, hint)).abs().mean() < 0.5


class HintedByAttribute(Own):
    """Something comes in between blocks 1 and 2 that no argument tells of."""

    hint = None

    def forward(self, x, t, cond):
        x = x + t / 1000
        for i, block in enumerate(self.blocks):
            x = block(x, cond)
            if i == 1 and self.hint is not None:
                x = x + self.hint
        return x


@pytest.mark.parametrize("site", BLOCK_SITES)
def test_a_hint_that_comes_and_goes_in_mid_run(site):
    """The structure changes under a learned contract: seen at once, the hint is in every output."""
    module = diffcache.wrap(HintedByAttribute(), "hold", site=site, warmup_steps=1, min_steps=0)
    plain, x = HintedByAttribute(), start(1, 5, 6)
    for i, t in enumerate(1000.0 - 10 * i for i in range(24)):
        module.hint = plain.hint = torch.full((1, 5, 6), 9.0) if 6 <= i < 14 else None
        out, true = module(x, t, COND), plain(x, t, COND)
        assert (out - true).abs().mean() < 0.5, (i, rows(module)[-1])
    assert reused(module) > 0


@pytest.mark.parametrize("site", ["stack", "span", {"kind": "span", "start": 0, "end": 3}])
@pytest.mark.parametrize("cls", [LongSkips, SkipsAsArguments, ReadsInBetween])
def test_long_skips_are_refused_or_right(cls, site):
    """Where a block's output is read elsewhere the stack is not skipped blindly."""
    module = diffcache.wrap(cls(), "hold", site=site)
    found, plain = drive(module, cond=COND), drive(cls(), cond=COND)
    if cls is SkipsAsArguments or reused(module):
        assert reused(module) > 0 and 0 < far(found, plain) < 0.35
    else:
        assert equal(found, plain)
        assert any("site='model'" in note for note in diffcache.report(module).summary["notes"])
    assert equal(drive(module, cond=COND), found)


def test_reads_in_between_are_found_by_the_replay():
    """A model that sums up all blocks' outputs cannot have them skipped, and says so."""
    module = diffcache.wrap(ReadsInBetween(), "hold", site="stack")
    assert equal(drive(module, cond=COND), drive(ReadsInBetween(), cond=COND))
    assert reused(module) == 0
    assert "site='model'" in str(diffcache.report(module))
    diffcache.wrap(module, "hold", site="model")
    drive(module, cond=COND)
    assert reused(module) > 0


@pytest.mark.parametrize("name", ["hold", "first_block", "taylorseer", "balanced"])
def test_vace(name):
    """Hints between blocks, a second list of blocks: exact when exact, hints when skipped."""
    torch.manual_seed(0)
    config = dict(
        num_layers=4,
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        rope_max_seq_len=32,
        vace_layers=[0, 2],
        vace_in_channels=8,
    )
    plain = WanVACETransformer3DModel(**config).eval()
    for parameter in plain.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    module = copy.deepcopy(plain)
    control = start(1, 8, 2, 8, 8)

    def run(model, scale=1.0):
        x, outputs = start(1, 4, 2, 8, 8), []
        for i in range(12):  # times close together: random weights are not smooth further apart
            out = model(
                hidden_states=x,
                timestep=torch.tensor([1000.0 - 20 * i]),
                encoder_hidden_states=torch.ones(1, 6, 16),
                control_hidden_states=control,
                control_hidden_states_scale=torch.full((2,), scale),
                return_dict=False,
            )[0]
            outputs.append(out)
            x = x - out / 12
        return outputs

    expected = run(plain)
    settings = {"first_block": {"threshold": 0.5}, "balanced": {"fraction": 0.6}}.get(name, {})
    found = run(diffcache.wrap(module, name, **settings))
    report = diffcache.report(module)
    assert reused(module) > 0 or any("site='model'" in note for note in report.summary["notes"])
    assert {out.shape for out in found} == {expected[0].shape}
    # Nearer to the full run than that is to one without control, so hints are not lost.
    assert far(found, expected) < 0.5 < far(run(plain, scale=0.0), expected)
    exact = diffcache.get_policy(name).exact
    assert equal(run(diffcache.wrap(module, name, **exact)), expected)


@pytest.fixture
def unet():
    """A tiny random UNet2DConditionModel."""
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=4,
    ).eval()


def run_unet(model):
    x, outputs = start(1, 4, 8, 8), []
    for t in TIMES:
        out = model(x, t, encoder_hidden_states=torch.ones(1, 6, 16), return_dict=False)[0]
        outputs.append(out)
        x = x - out / 12
    return outputs


def test_unet_at_the_model_site(unet):
    """A UNet needs no knowledge of its inside."""
    expected = run_unet(unet)
    module = diffcache.wrap(unet, "balanced")
    found = run_unet(module)
    assert reused(module) > 0 and far(found, expected) < 1.0
    assert equal(run_unet(diffcache.unwrap(module)), expected)


def test_unet_at_the_stack_site_is_refused_with_a_remedy(unet):
    """At wrap or by a note of the run; outputs stay exact."""
    expected = run_unet(unet)
    try:
        module = diffcache.wrap(unet, "hold", site="stack")
    except ValueError as error:
        assert "site='model'" in str(error)
        assert equal(run_unet(unet), expected) and "forward" not in unet.__dict__
        return
    found = run_unet(module)
    assert reused(module) or equal(found, expected)
    notes = " ".join(diffcache.report(module).summary["notes"])
    assert reused(module) or "site='model'" in notes
    assert far(found, expected) < 0.5

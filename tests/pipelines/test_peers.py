"""Caches of other libraries, as the bench runs them: they skip, repeat, and leave no trace."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import suppress
from importlib.util import find_spec

import diffusers
import pytest
import torch
from tiny_pipelines import batched_guidance, two_experts

from diffcache.errors import DiffcacheError
from diffcache.pipelines.denoisers import denoisers
from diffcache.pipelines.peers import INSTALL, peers

STEPS = 14
CACHE_DIT = pytest.mark.skipif(find_spec("cache_dit") is None, reason="cache-dit is not installed")
FAMILIES = [
    "diffusers FirstBlockCache",
    "diffusers TaylorSeer",
    "diffusers TaylorSeer lite",
    "diffusers MagCache",
    "diffusers SeaCache",
    "diffusers PyramidAttentionBroadcast",
    "diffusers FasterCache attention",
    *(
        pytest.param(f"cache-dit DBCache{forecaster}", marks=CACHE_DIT)
        for forecaster in (
            "",
            " + TaylorSeer",
            " + TaylorSeer order 2",
            " + FoCa",
            " + DMD",
        )
    ),
]


@pytest.fixture
def family_of(run_tiny):
    """The peers of one family for this pipeline, prepared."""

    def find(pipe, family):
        found = [peer for peer in peers(pipe, STEPS)[0] if peer.family == family]
        for peer in found:
            if peer.prepare is not None:
                peer.prepare(pipe, lambda: run_tiny(pipe, steps=STEPS))
        return found

    return find


def traces(pipe):
    """All that a cache may write on: attributes, hooks, containers, and the classes'."""
    modules = [m for denoiser in denoisers(pipe).values() for m in denoiser.modules()]
    registries = [vars(m)["_diffusers_hook"] for m in modules if "_diffusers_hook" in vars(m)]
    classes = {cls for owner in (pipe, *modules) for cls in type(owner).__mro__}
    owners = [pipe, *modules, *registries, *sorted(classes, key=repr)]
    return [
        (owner, {name: _seen(value) for name, value in vars(owner).items()}) for owner in owners
    ]


def _seen(value):
    """The value itself, with what it holds, so that a later change is noticed."""
    if isinstance(value, dict):
        return value, tuple(value.items())
    return (value, tuple(value)) if isinstance(value, list) else (value, None)


def assert_untouched(before, after):
    """The same owners with the same attributes, by identity."""
    assert [owner for owner, _ in before] == [owner for owner, _ in after]
    for (owner, old), (_, new) in zip(before, after, strict=True):
        assert list(old) == list(new), owner
        for name, (value, held) in old.items():
            assert value is new[name][0], (owner, name)
            assert _identities(held) == _identities(new[name][1]), (owner, name)


def _identities(held):
    if held is None:
        return None
    return [tuple(map(id, item)) if isinstance(item, tuple) else id(item) for item in held]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_peer_caches_and_leaves_no_trace(tiny_wan, run_tiny, family_of, family):
    """Its fastest setting changes the clip, the same way twice; then all is as before."""
    pipe, twin = tiny_wan(), tiny_wan()
    plain = run_tiny(pipe, steps=STEPS)
    peer = family_of(pipe, family)[-1]
    before = traces(pipe)
    with peer.apply(pipe):
        first, second = run_tiny(pipe, steps=STEPS), run_tiny(pipe, steps=STEPS)
        beside = run_tiny(twin, steps=STEPS)
    assert_untouched(before, traces(pipe))
    assert not torch.equal(first, plain) and torch.equal(first, second)
    assert torch.equal(beside, plain) and torch.equal(run_tiny(pipe, steps=STEPS), plain)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_peer_computes_less(tiny_wan, run_tiny, family_of, family):
    """Counted where the work is: feed-forward parts, or attention for those that skip only that."""
    pipe = tiny_wan()
    only_attention = family.endswith(("PyramidAttentionBroadcast", "FasterCache attention"))
    calls = []
    handles = [
        (block.attn1.to_q if only_attention else block.ffn.net[0]).register_forward_pre_hook(
            lambda *_: calls.append(1)
        )
        for block in pipe.transformer.blocks
    ]
    run_tiny(pipe, steps=STEPS)
    full = len(calls)
    peer = family_of(pipe, family)[-1]
    calls.clear()
    with peer.apply(pipe):
        run_tiny(pipe, steps=STEPS)
    assert full == 2 * STEPS * len(handles) and 0 < len(calls) < full


@pytest.mark.parametrize("family", FAMILIES)
def test_after_an_exception(tiny_wan, run_tiny, family_of, family):
    """A run that is cancelled under a peer leaves nothing in the pipeline or in the next run."""
    pipe = tiny_wan()
    plain = run_tiny(pipe, steps=STEPS)
    peer = family_of(pipe, family)[-1]
    with peer.apply(pipe):
        expected = run_tiny(pipe, steps=STEPS)
    before = traces(pipe)

    def stop(_pipe, step, _timestep, kept):
        if step == 9:
            raise KeyboardInterrupt
        return kept

    with suppress(KeyboardInterrupt), peer.apply(pipe):
        run_tiny(pipe, steps=STEPS, callback_on_step_end=stop)
    assert_untouched(before, traces(pipe))
    assert torch.equal(run_tiny(pipe, steps=STEPS), plain)
    with peer.apply(pipe):
        assert torch.equal(run_tiny(pipe, steps=STEPS), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_pipeline(tiny_wan, run_tiny, family_of, family):
    """One that never ran has no traces of a peer either, and runs as its twin."""
    pipe = tiny_wan()
    peer = family_of(pipe, family)[0]
    fresh = tiny_wan()
    before = traces(fresh)
    with peer.apply(fresh):
        run_tiny(fresh, steps=STEPS)
    assert_untouched(before, traces(fresh))
    assert torch.equal(run_tiny(fresh, steps=STEPS), run_tiny(tiny_wan(), steps=STEPS))


def test_the_list(tiny_wan):
    """Families of four settings and more, named once each; it leaves the pipeline as it is."""
    pipe = tiny_wan()
    before = traces(pipe)
    found, missing = peers(pipe, STEPS)
    assert_untouched(before, traces(pipe))
    names = [(peer.family, peer.setting) for peer in found]
    assert len(set(names)) == len(names)
    families = {family: [n for n in names if n[0] == family] for family, _ in names}
    expected = {getattr(family, "values", (family,))[0] for family in FAMILIES}
    if find_spec("cache_dit") is None:
        expected = {family for family in expected if family.startswith("diffusers")}
    assert set(families) == expected and all(len(grid) >= 4 for grid in families.values())
    gating = {peer.family for peer in found if peer.block_gating}
    assert gating == {"diffusers FirstBlockCache", "cache-dit DBCache"} & expected
    assert "IndexError" in missing["diffusers FasterCache"]
    assert all("\n" not in reason for reason in missing.values())


def test_faster_cache_fails_as_told(tiny_wan, run_tiny):
    """The reason given for leaving out its part on guidance is what happens."""
    pipe = tiny_wan()
    pipe.transformer.enable_cache(
        diffusers.FasterCacheConfig(
            tensor_format="BCFHW", current_timestep_callback=lambda: pipe.current_timestep
        )
    )
    with pytest.raises(IndexError):
        run_tiny(pipe, steps=STEPS)


def test_without_cache_dit(tiny_wan, monkeypatch):
    """Not installed: said with the command that installs it."""
    monkeypatch.setattr("diffcache.pipelines.peers_cache_dit.find_spec", lambda name: None)
    found, missing = peers(tiny_wan(), STEPS)
    assert missing["cache-dit DBCache"] == INSTALL
    assert found and all(peer.family.startswith("diffusers") for peer in found)


def test_where_a_cache_finds_nothing():
    """A denoiser without blocks: every family has a reason, none is on the list."""
    pipe = two_experts(first=False, second=False)
    found, missing = peers(pipe, STEPS)
    assert not found and "cache-dit DBCache" in missing and len(missing) >= 7


def test_both_experts_are_cached(family_of):
    """Wan 2.2: each expert gets the cache, and each is put back."""
    pipe = two_experts()
    before = traces(pipe)
    first = next(peer for peer in peers(pipe, STEPS)[0] if peer.block_gating)
    with first.apply(pipe):
        for denoiser in denoisers(pipe).values():
            assert denoiser.is_cache_enabled
    assert_untouched(before, traces(pipe))


def test_another_pipeline_class():
    """LTX passes both guidance halves in one batch; FirstBlockCache goes on and off."""
    pipe = batched_guidance()
    before = traces(pipe)
    found, missing = peers(pipe, STEPS)
    assert_untouched(before, traces(pipe))
    assert "diffusers FirstBlockCache" in {peer.family for peer in found}
    assert "diffusers SeaCache" in missing or any("SeaCache" in peer.family for peer in found)


def test_mag_cache_measures_once(tiny_wan, run_tiny):
    """One clip for all its settings; asked to run before, it says what to call."""
    pipe, clips = tiny_wan(), []

    def run():
        clips.append(run_tiny(pipe, steps=STEPS))

    family = [peer for peer in peers(pipe, STEPS)[0] if peer.family == "diffusers MagCache"]
    with pytest.raises(DiffcacheError, match="prepare"), family[0].apply(pipe):
        pass
    for peer in family:
        peer.prepare(pipe, run)
    assert len(clips) == 1 and torch.equal(clips[0], run_tiny(pipe, steps=STEPS))


def test_mag_cache_of_a_shorter_run(tiny_wan, run_tiny):
    """A clip of fewer steps than promised gives no curve, and that is an error."""
    pipe = tiny_wan()
    peer = next(p for p in peers(pipe, STEPS)[0] if p.prepare is not None)
    with pytest.raises(DiffcacheError, match="14 steps"):
        peer.prepare(pipe, lambda: run_tiny(pipe, steps=5))


def test_a_peer_is_a_value(tiny_wan):
    """Frozen, so a list of peers can be run in any order."""
    peer = peers(tiny_wan(), STEPS)[0][0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        peer.setting = "other"


@CACHE_DIT
def test_cache_dit_is_quiet(tiny_wan, run_tiny, capfd):
    """Neither its settings nor its counts are printed."""
    pipe = tiny_wan()
    found = [p for p in peers(pipe, STEPS)[0] if p.family.startswith("cache-dit")]
    capfd.readouterr()
    with found[0].apply(pipe):
        run_tiny(pipe, steps=STEPS)
    assert capfd.readouterr().out == ""


def test_nothing_is_imported_for_the_list():
    """Importing the list loads neither library."""
    import subprocess

    code = (
        "import sys, diffcache.pipelines.peers, diffcache.pipelines.peers_diffusers,"
        "diffcache.pipelines.peers_cache_dit;"
        "sys.exit(any(name in sys.modules for name in ('diffusers', 'cache_dit')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

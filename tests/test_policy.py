"""Policies: to and from dicts, JSON and YAML; settings by name; errors that say what is wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields

import pytest
import yaml

import diffcache
from diffcache import Policy
from diffcache.features import base
from diffcache.features.base import PARTS, SLOTS, Gate, build

ALL_PARTS = [(slot, kind) for slot in SLOTS for kind in PARTS[slot]]
PLAIN = {"site": "stack", "gate": "interval", "predictor": "hold"}
# Values other than the defaults, by setting.
OTHER = {
    "form": "residual",
    "dtype": "bfloat16",
    "device": "cpu",
    "steps": (0, 3, 5),
    "end": -2,
    "max_reuses": 4,
    "max_error": 0.25,
    "max_bytes": 1000,
    "ranks": "world",
    "max_steps": 5,
    "threshold": 0.25,
    "mask": (1, 0),
    "max_reused": 4,
    "coefficients": (2.0, 0.5),
    "fitted_steps": 40,
    "signal": "embedding",
    "model": "wan2.1-t2v-1.3b",
    "max_skips": 4,
    "retention": 0.3,
    "curves": (("cond", (1.0, 0.5), (1.0, 0.75)),),
    "reference_steps": 40,
    "sigmas": (0.75, 0.5),
}


def sample(slot, kind):
    """A part of a kind with no setting at its default."""
    cls = PARTS[slot][kind]
    values = {}
    for field in fields(cls):
        changed = OTHER.get(field.name)
        if changed is None and isinstance(field.default, (int, float)):
            kind = type(field.default)
            changed = kind(1) if field.default != 1 else kind(0 if kind is bool else 2)
            if field.name in ("memory", "fraction"):
                changed = 0.75
        values[field.name] = changed
    return cls(**values)


def policy_with(slot, piece):
    """A policy holding this part."""
    parts = {**PLAIN, slot: piece}
    if slot in ("probe", "metric"):
        parts = {"probe": "site_input", "metric": "relative_l1", **parts}
    if slot == "predictor":
        parts["site"] = "model"  # the only one that `correct` fits
    return Policy(**parts)


@pytest.mark.parametrize(("slot", "kind"), ALL_PARTS)
def test_every_part_round_trips(slot, kind):
    """With every setting changed, through a dict, JSON and YAML."""
    piece = sample(slot, kind)
    assert all(getattr(piece, f.name) != f.default for f in fields(piece))
    written = piece.to_dict()
    for copy in (written, json.loads(json.dumps(written)), yaml_trip(written)):
        assert build(slot, copy) == piece


def yaml_trip(value):
    return yaml.safe_load(yaml.safe_dump(json.loads(json.dumps(value))))


@pytest.mark.parametrize("suffix", [".json", ".yaml", ".yml"])
@pytest.mark.parametrize(("slot", "kind"), ALL_PARTS)
def test_every_part_round_trips_in_a_file(slot, kind, suffix, tmp_path):
    """A saved policy is loaded as an equal one."""
    policy = policy_with(slot, sample(slot, kind))
    policy.save(tmp_path / f"p{suffix}")
    assert diffcache.load(tmp_path / f"p{suffix}") == policy


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
@pytest.mark.parametrize("name", diffcache.policies())
def test_named_policies_round_trip(name, suffix, tmp_path):
    """Name, source, summary and exact settings travel along, and the path may be given as text."""
    policy = diffcache.get_policy(name)
    policy.save(str(tmp_path / f"p{suffix}"))
    assert diffcache.load(str(tmp_path / f"p{suffix}")) == policy
    assert diffcache.get_policy(tmp_path / f"p{suffix}") == policy


def test_parts_by_name_mapping_and_object():
    """Three ways to say the same."""
    threshold = {"kind": "interval", "interval": 3}
    a = Policy(**{**PLAIN, "gate": threshold})
    b = Policy(**{**PLAIN, "gate": build("gate", threshold)})
    assert a == b == Policy(**PLAIN).with_settings(interval=3)


def test_frozen():
    """Neither a policy nor its parts can be changed."""
    policy = diffcache.get_policy("easycache")
    for owner, name in [(policy, "name"), (policy.gate, "threshold"), (policy.guards, "min_steps")]:
        with pytest.raises(AttributeError):
            setattr(owner, name, 1)


def test_settings_by_name():
    """Every setting of every part under its own name."""
    settings = diffcache.get_policy("easycache").settings()
    assert settings["threshold"] == 0.05 and settings["warmup_steps"] == 10
    assert settings["form"] == "residual" and settings["max_bytes"] is None


def test_with_settings_leaves_the_original():
    """A copy is changed, in all parts named."""
    policy = diffcache.get_policy("easycache")
    other = policy.with_settings(threshold=0.2, warmup_steps=2, max_bytes=10)
    assert (other.gate.threshold, other.guards.warmup_steps, other.store.max_bytes) == (0.2, 2, 10)
    assert policy == diffcache.get_policy("easycache") and policy.gate.threshold == 0.05


def test_whole_parts_and_their_settings_together():
    """`gate="threshold", threshold=0.3` needs the setting of the part just given."""
    policy = diffcache.get_policy("taylorseer", site="model", order=2)
    assert policy.site.kind == "model" and policy.predictor.order == 2
    gate = {"kind": "table", "fraction": 0.3}
    assert diffcache.get_policy("taylorseer", gate=gate).gate.fraction == 0.3
    swapped = diffcache.get_policy("easycache", gate="threshold", threshold=0.3)
    assert (swapped.gate.kind, swapped.gate.threshold) == ("threshold", 0.3)
    table = diffcache.get_policy("taylorseer", gate="table", fraction=0.3)
    assert table.gate.fraction == 0.3


@pytest.fixture
def two_orders(monkeypatch):
    """A policy two of whose parts have a setting called `order`."""

    @dataclass(frozen=True, kw_only=True)
    class OrderedGate(Gate):
        order: int = 7

    monkeypatch.setitem(base.PARTS["gate"], "ordered_gate", OrderedGate)
    OrderedGate.slot, OrderedGate.kind = "gate", "ordered_gate"
    return Policy(site="stack", gate=OrderedGate(), predictor="polynomial")


def test_same_name_in_two_parts(two_orders):
    """Both are listed with their slot, and only so can they be set."""
    settings = two_orders.settings()
    assert (settings["gate.order"], settings["predictor.order"]) == (7, 1)
    assert "order" not in settings
    changed = two_orders.with_settings(**{"gate.order": 9, "predictor.order": 2})
    assert (changed.gate.order, changed.predictor.order) == (9, 2)
    with pytest.raises(
        ValueError, match=r"'order' is a setting of gate and predictor: write gate\.order"
    ):
        two_orders.with_settings(order=3)


def test_describe_is_one_line():
    """Site, probe, metric, gate and predictor with their settings."""
    line = diffcache.get_policy("first_block").describe()
    assert line == (
        "stack(front=1, back=0) . front_residual . relative_l1 . threshold(threshold=0.05) . hold"
    )


def test_decides_per_item_or_batch():
    """A metric or a closed loop looks at the whole batch; tables and intervals do not."""
    expected = {"hold": "item", "taylorseer": "item", "easycache": "batch", "first_block": "batch"}
    found = {name: diffcache.get_policy(name).decides for name in expected}
    assert found == expected
    assert diffcache.get_policy("forecast").decides == "batch"
    assert diffcache.get_policy("hold", max_error=0.5).decides == "batch"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"gate": "treshold"},
            "unknown gate 'treshold'; did you mean 'threshold' or 'masked_threshold'?",
        ),
        ({"site": "modell"}, "unknown site 'modell'; did you mean 'model'?"),
        ({"predictor": "zzz"}, "unknown predictor 'zzz'; known: best_order, hold, polynomial"),
        (
            {"gate": {"kind": "interval", "intervall": 3}},
            "gate 'interval' has no setting 'intervall'; did you mean 'interval'?",
        ),
        ({"gate": build("site", "model")}, "gate must be a gate part, got the site 'model'"),
        ({"axis": "time"}, "axis must be 'step' or 'chunk', got 'time'"),
        ({"probe": "site_input"}, "probe and metric come together: give both or neither"),
        (
            {"site": "model", "probe": "front_residual", "metric": "relative_l1"},
            "probe 'front_residual' needs a stack or span site, got 'model'",
        ),
    ],
)
def test_parts_that_do_not_fit(change, message):
    """One line that says what was given and what would fit."""
    with pytest.raises(ValueError) as caught:
        Policy(**{**PLAIN, **change})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"treshold": 0.1},
            "policy 'easycache' has no setting 'treshold'; did you mean 'threshold'",
        ),
        ({"threshold": -1}, "threshold must be at least 0, got -1"),
        ({"threshold": float("nan")}, "threshold must be at least 0, got nan"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0, got -1"),
        ({"form": "latents"}, "form must be 'output' or 'residual', got 'latents'"),
        ({"threshold": "high"}, "threshold must be"),
        ({"max_bytes": "2 GB"}, "max_bytes must be"),
    ],
)
def test_wrong_settings(overrides, message):
    """Unknown names, values out of range, values of the wrong type."""
    with pytest.raises(ValueError) as caught:
        diffcache.get_policy("easycache", **overrides)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)

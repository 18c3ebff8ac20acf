"""The public names and their signatures: changing one of these is a decision, not an accident."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import diffcache

FUNCTIONS = {
    "wrap": "(target, policy='balanced', *, strict=False, **overrides)",
    "unwrap": "(target)",
    "reset": "(target)",
    "report": "(target)",
    "disabled": "(target)",
    "chunk": "(target, index)",
    "kv_write": "(target)",
    "policies": "()",
    "get_policy": "(policy, **overrides)",
    "load": "(path)",
    "kv_roles": "(model, roles)",
    "load_cache": "(path, model)",
}
CLASSES = {"CallContext", "DiffcacheError", "DiffcacheWarning", "Policy", "Report"}
ROOMS = {
    "calibrate": {"calibrate", "record"},
    "magnitudes": {"measure"},
    "kv": {
        "Admission",
        "AdmissionRefused",
        "KVPolicy",
        "KVReport",
        "Positions",
        "RollingCache",
        "RollingSettings",
        "get_kv_policy",
        "held_bytes",
        "kv_bytes",
        "kv_policies",
        "load_kv_policy",
    },
}
ROOM_FUNCTIONS = {
    "kv.get_kv_policy": "(policy, **overrides)",
    "kv.held_bytes": "(tensors)",
    "kv.kv_bytes": "(config, tokens, *, batch_size=1, dtype=None)",
    "kv.kv_policies": "()",
    "kv.load_kv_policy": "(path)",
    "calibrate.calibrate": "(pipe, runs, *, policy='forecast', fraction=None, "
    "error_weights=(-1.0, -0.5, 0.0, 0.25, 0.5, 0.75, 1.0), worst=(2.0, 8.0))",
    "calibrate.record": "(pipe, runs)",
    "magnitudes.measure": "(pipe, run, **settings)",
}
POLICY_PARTS = ("site", "axis", "probe", "metric", "gate", "predictor", "guards", "store")
PRESETS = {"exact", "quality", "balanced", "fast"}
FIRST_POLICIES = {"hold", "easycache", "first_block", "taylorseer", "forecast"}


def _signature(function: object) -> str:
    """Names, kinds and defaults, without annotations."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(plain))


def test_all_lists_the_public_names() -> None:
    assert set(diffcache.__all__) == FUNCTIONS.keys() | CLASSES | ROOMS.keys()
    assert set(dir(diffcache)) >= set(diffcache.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signature(name: str) -> None:
    function = getattr(diffcache, name)
    assert _signature(function) == FUNCTIONS[name]
    assert function.__doc__, f"diffcache.{name} needs a docstring"


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_class(name: str) -> None:
    assert inspect.isclass(getattr(diffcache, name))


@pytest.mark.parametrize("room", ROOMS)
def test_room(room: str) -> None:
    names = getattr(diffcache, room).__all__
    assert set(names) == ROOMS[room]
    for name in names:
        found = getattr(getattr(diffcache, room), name)
        assert inspect.isclass(found) or f"{room}.{name}" in ROOM_FUNCTIONS


@pytest.mark.parametrize("name", ROOM_FUNCTIONS)
def test_signature_in_a_room(name: str) -> None:
    room, _, function = name.partition(".")
    found = getattr(getattr(diffcache, room), function)
    assert _signature(found) == ROOM_FUNCTIONS[name]
    assert found.__doc__


def test_rolling_cache_takes_its_sizes_first() -> None:
    assert _signature(diffcache.kv.RollingCache) == "(sink_size, window_size, **settings)"


def test_policy_is_a_frozen_composition_of_named_parts() -> None:
    fields = diffcache.Policy.__dataclass_fields__
    assert set(POLICY_PARTS) | {"exact", "name", "source", "summary"} == set(fields)
    with pytest.raises(AttributeError):
        diffcache.get_policy("hold").gate = None


def test_policies_of_this_release_are_there() -> None:
    assert set(diffcache.policies()) >= PRESETS | FIRST_POLICIES


def test_report_has_rows_a_summary_and_two_files(tiny_wan: Callable[..., Any]) -> None:
    report = diffcache.report(diffcache.wrap(tiny_wan()))
    assert isinstance(report, diffcache.Report)
    assert isinstance(report.rows, list) and isinstance(report.summary, dict)
    assert _signature(diffcache.Report.to_json) == "(self)"
    assert _signature(diffcache.Report.to_html) == "(self, path)"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'warp'"):
        diffcache.warp  # noqa: B018

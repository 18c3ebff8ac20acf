"""Policy files that are broken: one line that names the file."""

from __future__ import annotations

import json

import pytest

import diffcache

GOOD = {"diffcache_policy": 1, "site": "model", "gate": "interval", "predictor": "hold"}


def without(key):
    return {name: value for name, value in GOOD.items() if name != key}


BROKEN = {
    "empty": "",
    "no_json": "{not json",
    "list": "[1, 2]",
    "number": "5",
    "text": '"hold"',
    "null": "null",
    "no_version": json.dumps(without("diffcache_policy")),
    "other_version": json.dumps({**GOOD, "diffcache_policy": 2}),
    "no_site": json.dumps(without("site")),
    "no_gate": json.dumps(without("gate")),
    "unknown_key": json.dumps({**GOOD, "gates": "hold"}),
    "unknown_kind": json.dumps({**GOOD, "gate": "intervall"}),
    "unknown_setting": json.dumps({**GOOD, "gate": {"kind": "interval", "n": 3}}),
    "no_kind": json.dumps({**GOOD, "gate": {"interval": 3}}),
    "out_of_range": json.dumps({**GOOD, "gate": {"kind": "interval", "interval": 0}}),
    "wrong_type": json.dumps({**GOOD, "gate": {"kind": "threshold", "threshold": "high"}}),
    "null_setting": json.dumps({**GOOD, "gate": {"kind": "threshold", "threshold": None}}),
    "nan_setting": '{"diffcache_policy": 1, "site": "model", "predictor": "hold", '
    '"gate": {"kind": "threshold", "threshold": NaN}}',
    "gate_is_null": json.dumps({**GOOD, "gate": None}),
    "guards_are_null": json.dumps({**GOOD, "guards": None}),
    "gate_is_a_number": json.dumps({**GOOD, "gate": 5}),
    "gate_is_a_list": json.dumps({**GOOD, "gate": ["interval"]}),
    "kind_is_a_list": json.dumps({**GOOD, "gate": {"kind": ["interval"]}}),
    "device": json.dumps({**GOOD, "store": {"kind": "store", "device": "quantum"}}),
    "exact_is_a_number": json.dumps({**GOOD, "exact": 5}),
    "axis": json.dumps({**GOOD, "axis": "time"}),
}
BROKEN_YAML = {"tab": "a:\n\t- b", "bracket": "a: [1, 2", "object": "!!python/object:os.system {}"}


def assert_one_line_naming(path):
    with pytest.raises(ValueError) as caught:
        diffcache.load(path)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message and len(message) > len(str(path)) + 5


def test_the_good_file_is_good(tmp_path):
    """What the broken ones are made from loads."""
    (tmp_path / "p.json").write_text(json.dumps(GOOD))
    assert diffcache.load(tmp_path / "p.json").gate.kind == "interval"


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_file(name, suffix, tmp_path):
    """JSON is YAML too, so each is tried as both."""
    path = tmp_path / f"{name}{suffix}"
    path.write_text(BROKEN[name].replace("NaN", ".nan" if suffix == ".yaml" else "NaN"))
    assert_one_line_naming(path)


@pytest.mark.parametrize("name", BROKEN_YAML)
def test_broken_yaml(name, tmp_path):
    """Syntax errors, and tags that would run code."""
    path = tmp_path / "p.yaml"
    path.write_text(BROKEN_YAML[name])
    assert_one_line_naming(path)


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_bytes_that_are_no_text(suffix, tmp_path):
    """A picture by mistake."""
    path = tmp_path / f"p{suffix}"
    path.write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    assert_one_line_naming(path)


@pytest.mark.parametrize("name", ["p.txt", "p", "p.safetensors"])
def test_other_endings(name, tmp_path):
    """Neither written nor read."""
    (tmp_path / name).write_text(json.dumps(GOOD))
    assert_one_line_naming(tmp_path / name)
    with pytest.raises(ValueError, match=r"ends in \.json, \.yaml or \.yml"):
        diffcache.get_policy("hold").save(tmp_path / name)


def test_missing_file(tmp_path):
    """Python's own error, which names the file."""
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        diffcache.load(tmp_path / "none.json")
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        diffcache.get_policy(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ({"name": 5}, "name must be text, got 5"),
        ({"summary": None}, "summary must be text, got None"),
        ({"exact": 5}, "exact must be settings by name, got 5"),
        ({"site": 3}, "site must be a part, its kind or a mapping, got 3"),
        ({"gate": ["table"]}, "gate must be a part, its kind or a mapping, got ['table']"),
        ({"gate": {"kind": ["table"]}}, "unknown gate ['table']"),
    ],
)
def test_what_is_no_policy_is_refused_in_one_line(override, said):
    with pytest.raises(ValueError) as caught:
        diffcache.get_policy("hold", **override)
    assert str(caught.value).startswith(said)


def test_files_that_hold_no_text_or_are_not_there_say_so(tmp_path):
    cases = {"empty.json": (b"", "not JSON"), "bytes.json": (b"\xff\xfe", "not UTF-8 text")}
    for name, (content, said) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}: {said}"):
            diffcache.load(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"there is no policy file .*missing"):
        diffcache.get_policy(str(tmp_path / "missing.yaml"))

"""Settings of another kind than their annotation are refused, in one line, by every part."""

from __future__ import annotations

import json
from math import inf, nan

import pytest

import diffcache
from diffcache.features.kinds import fits

WRONG = [nan, -1, 2.5, 10**9, "", "off", True, [1], [0.5, nan], (), {}, object(), None]


@pytest.mark.parametrize("name", diffcache.policies())
def test_every_setting_is_taken_or_refused_in_one_line(name):
    """Nothing else is raised, and what is taken has its kind and can be written to a file."""
    policy = diffcache.get_policy(name)
    for setting, default in policy.settings().items():
        for value in WRONG:
            try:
                made = policy.with_settings(**{setting: value}).settings()[setting]
            except ValueError as error:
                assert "\n" not in str(error)
                continue
            kept = list(made) if isinstance(made, tuple) else made
            assert json.loads(json.dumps(made)) == kept
            if default is not None:
                kinds = (int, float) if isinstance(default, float) else type(default)
                assert made is None or isinstance(made, kinds)
                assert isinstance(made, bool) == isinstance(default, bool) or made is None


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("correct", "off", "correct must be true or false, got 'off'"),
        ("shipped", 0, "shipped must be true or false, got 0"),
        ("fraction", True, "fraction must be a number, got True"),
        ("fraction", "half", "fraction must be a number, got 'half'"),
        ("steps", 5, "steps must be a list of whole numbers or none, got 5"),
        ("steps", [1, 2.5], "steps must be a list of whole numbers or none, got (1, 2.5)"),
        ("sigmas", 0.5, "sigmas must be a list of numbers or none, got 0.5"),
        ("sigmas", [0.5, nan], "sigmas must be noise levels in [0, 1], got (0.5, nan)"),
        ("device", 3, "device must be text or none, got 3"),
        ("form", 3, "form must be one of output, residual, got 3"),
    ],
)
def test_the_message_says_what_was_expected(setting, value, said):
    with pytest.raises(ValueError) as caught:
        diffcache.get_policy("forecast", **{setting: value})
    assert said in str(caught.value)


def test_a_list_from_the_command_line_is_kept_as_a_tuple(tmp_path):
    """So that the policy equals the one that its file gives back."""
    policy = diffcache.get_policy("forecast", steps=[0, 1, 5, 9])
    assert policy.settings()["steps"] == (0, 1, 5, 9)
    policy.save(tmp_path / "p.json")
    assert diffcache.load(tmp_path / "p.json") == policy


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, float, True),
        (1.0, int, False),
        (True, int, False),
        (inf, float, True),
        ((), tuple[float, ...], True),
        (("a", (1.0,)), tuple[str, tuple[float, ...]], True),
        (("a",), tuple[str, tuple[float, ...]], False),
        ({"a": 1}, dict[str, int], True),
        ([], dict[str, int], False),
    ],
)
def test_kinds(value, hint, expected):
    assert fits(value, hint) is expected

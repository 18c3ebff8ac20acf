"""Named policies: found by themselves, unknown names answered with near ones."""

from __future__ import annotations

import pytest

import diffcache
from diffcache.features import policies as folder
from diffcache.registry import get_policy, policies, register


def test_names_are_sorted_and_complete():
    """At least the methods and presets of this round."""
    assert list(policies()) == sorted(policies())
    assert {"hold", "easycache", "first_block", "taylorseer", "forecast"} <= set(policies())
    assert {"exact", "quality", "balanced", "fast"} <= set(policies())


def test_every_file_of_the_folder_registers():
    """A file that registers nothing would be dead."""
    modules = {
        diffcache.registry._POLICIES[name].__module__.rpartition(".")[2] for name in policies()
    }
    files = {path.stem for path in map(type(folder_path()), folder_path().glob("[a-z]*.py"))}
    assert files == modules


def folder_path():
    from pathlib import Path

    return Path(folder.__path__[0])


@pytest.mark.parametrize("name", policies())
def test_each_call_gives_an_equal_policy(name):
    """Names are recipes without memory."""
    assert get_policy(name) == get_policy(name)
    assert get_policy(get_policy(name)) is not None


def test_presets_are_ordered():
    """exact computes all; quality more than balanced, balanced more than fast."""
    shares = [get_policy(name).gate.fraction for name in ("exact", "quality", "balanced", "fast")]
    assert shares[0] == 1.0 and shares == sorted(shares, reverse=True) and len(set(shares)) == 4


@pytest.mark.parametrize(
    ("name", "near"),
    [("easycash", "'easycache'"), ("firstblock", "'first_block'"), ("Balanced", "'balanced'")],
)
def test_near_names(name, near):
    """The message proposes what was probably meant."""
    with pytest.raises(ValueError) as caught:
        get_policy(name)
    assert str(caught.value).startswith(f"unknown policy '{name}'; did you mean ")
    assert near in str(caught.value)


def test_far_names_list_all():
    """Where nothing is near, all names are listed."""
    with pytest.raises(ValueError) as caught:
        get_policy("xyzzy")
    assert str(caught.value) == f"unknown policy 'xyzzy'; known: {', '.join(policies())}"


def test_a_name_cannot_be_taken_twice():
    """Two files with one policy name would hide one another."""

    def hold():
        """Not the one in features/policies."""

    before = get_policy("hold")
    with pytest.raises(ValueError, match="policy 'hold' is registered twice"):
        register(hold)
    assert get_policy("hold") == before


def test_overrides_go_to_the_policy():
    """By name, by object, by file."""
    assert get_policy("hold", fraction=0.7).gate.fraction == 0.7
    assert get_policy(get_policy("hold"), fraction=0.7).gate.fraction == 0.7

"""KV policies: what they refuse, and that files give back what was saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffcache import kv
from diffcache.kv.base import PARTS, discover
from diffcache.kv.budgets import Uniform
from diffcache.kv.scorers.position import Position

discover()


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
@pytest.mark.parametrize("name", kv.kv_policies())
def test_a_file_gives_back_the_policy(name: str, suffix: str, tmp_path: Path) -> None:
    policy = kv.get_kv_policy(name)
    policy.save(tmp_path / f"policy{suffix}")
    assert kv.load_kv_policy(tmp_path / f"policy{suffix}") == policy
    assert kv.get_kv_policy(str(tmp_path / f"policy{suffix}")) == policy


@pytest.mark.parametrize("name", kv.kv_policies())
def test_a_named_policy_says_what_it_is(name: str) -> None:
    policy = kv.get_kv_policy(name)
    assert policy.name == name and policy.summary
    maker = next(made for made in dir(kv) if made.lower() == name and made not in kv.__all__)
    assert getattr(kv, maker)() == policy
    assert getattr(kv, maker).__doc__


def test_an_unknown_key_in_a_file_is_refused_with_near_matches(tmp_path: Path) -> None:
    policy = kv.get_kv_policy("keydiff").to_dict()
    for wrong, near in (({"scorrer": "position"}, "scorer"), ({"positionz": 1}, "positions")):
        with pytest.raises(ValueError, match=f"has no key.*{near}"):
            kv.KVPolicy.from_dict({**policy, **wrong})
    with pytest.raises(ValueError, match=r"no setting 'windows'.*window"):
        kv.KVPolicy.from_dict({**policy, "scorer": {"kind": "window_attention", "windows": 1}})


def test_names_that_are_close_are_offered() -> None:
    with pytest.raises(ValueError, match=r"unknown KV policy 'snapk'.*snapkv"):
        kv.get_kv_policy("snapk")
    with pytest.raises(ValueError, match=r"no setting 'keeep'.*keep"):
        kv.get_kv_policy("snapkv", keeep=0.3)


def test_a_budget_is_exactly_one_of_tokens_bytes_and_keep() -> None:
    for wrong in ({}, {"tokens": 5, "keep": 0.5}):
        with pytest.raises(ValueError, match="exactly one of tokens, bytes, keep"):
            Uniform(**wrong)
    with pytest.raises(ValueError, match=r"keep must be in \[0, 1\], got 1.5"):
        Uniform(keep=1.5)


def test_another_amount_replaces_the_one_that_was_there() -> None:
    budget = kv.get_kv_policy("keydiff", tokens=64).budget
    assert (budget.tokens, budget.keep, budget.bytes) == (64, None, None)


def test_protection_that_does_not_fit_the_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="tokens must be at least the 12"):
        kv.KVPolicy(scorer=Position(), budget=Uniform(tokens=8))


def test_positions_that_rotated_keys_cannot_have_are_refused() -> None:
    with pytest.raises(ValueError, match="positions must be 'keep' in a KV policy"):
        kv.get_kv_policy("keydiff", positions="renumber")


def test_parts_can_be_named() -> None:
    policy = kv.KVPolicy(scorer="position", budget={"kind": "uniform", "keep": 0.5})
    assert policy.scorer == Position() and policy.budget == Uniform(keep=0.5)
    with pytest.raises(ValueError, match="scorer must be a scorer part, got the budget 'uniform'"):
        kv.KVPolicy(scorer=Uniform(keep=1.0), budget=Uniform(keep=1.0))


@pytest.mark.parametrize("slot", PARTS)
def test_every_part_says_what_it_is(slot: str) -> None:
    for cls in PARTS[slot].values():
        assert cls.__doc__ and not cls.__doc__.startswith(cls.__name__ + "(")

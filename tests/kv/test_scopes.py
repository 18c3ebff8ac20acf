"""Per-layer scopes: what their names promise."""

from __future__ import annotations

import pytest

from diffcache.kv.scopes import scope


def kept(name: str, end: int) -> list[int]:
    named = scope(name, 3, 4)
    return [frame for frame in range(end + 5) if named.keeps(frame, end)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", []),
        ("recent_1", [19]),
        ("recent_2", [18, 19]),
        ("recent_4", [16, 17, 18, 19]),
        ("anchor", [11, 17]),
        ("recent_2+anchor", [11, 17, 18, 19]),
        ("recent_4+anchor", [11, 16, 17, 18, 19]),
        ("sink+window", [0, 1, 2, 16, 17, 18, 19]),
        ("sink", [0, 1, 2]),
    ],
)
def test_frames_kept_after_twenty(name: str, expected: list[int]) -> None:
    assert kept(name, 20) == expected


@pytest.mark.parametrize("name", ["anchor", "recent_4+anchor", "sink+window", "sink+recent_1"])
def test_what_is_dropped_never_comes_back_and_slots_and_reach_suffice(name: str) -> None:
    named, before = scope(name, 3, 4), set[int]()
    for end in range(1, 60):
        now = set(kept(name, end))
        assert now <= before | {end - 1}
        assert len(now) <= named.slots
        assert all(frame < 3 or frame >= end - named.reach for frame in now)
        before = now


def test_the_published_table_takes_66_slots() -> None:
    table = {"none": 10, "recent_1": 2, "recent_2": 7, "recent_4": 3, "anchor": 1}
    table |= {"recent_2+anchor": 3, "recent_4+anchor": 4}
    assert sum(layers * scope(name, 0, 6).slots for name, layers in table.items()) == 66


@pytest.mark.parametrize("name", ["", "recent_0", "recent", "sink+", "anchors", "none+sink"])
def test_an_unknown_scope_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a scope is 'none' or of"):
        scope(name, 3, 4)

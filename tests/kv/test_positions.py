"""The position modes against numbers worked out by hand."""

from __future__ import annotations

import random

import pytest

from diffcache.kv.positions import Positions, Span, place, refusal, shift, stride

# Two sinks (0, 1) and a window of four; frames 2 to 7 are gone; a chunk of three starts at 12.
HELD = [0, 1, 8, 9, 10, 11]
SPAN = Span(sink_size=2, reach=4, max_position=14)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("keep", [0, 1, 8, 9, 10, 11, 12]),
        ("relative", [0, 1, 2, 3, 4, 5, 6]),
        ("anchor", [6, 7, 8, 9, 10, 11, 12]),
        # The chunk ends at 15, one beyond 14; strides are (14 - 2 - 4) // 2 = 4.
        ("renumber", [0, 1, 4, 5, 6, 7, 8]),
        ("recompute", [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_positions_by_hand(mode: str, expected: list[int]) -> None:
    assert place(Positions(mode), HELD, 12, 3, SPAN) == expected


@pytest.mark.parametrize("mode", list(Positions))
def test_slot_order_does_not_matter(mode: Positions) -> None:
    mixed = [0, 1, 10, 11, 8, 9]
    sorted_places = dict(zip(HELD, place(mode, HELD, 12, 3, SPAN), strict=False))
    assert place(mode, mixed, 12, 3, SPAN)[:-1] == [sorted_places[frame] for frame in mixed]


@pytest.mark.parametrize("mode", list(Positions))
def test_before_the_first_eviction_every_mode_is_keep(mode: Positions) -> None:
    assert place(mode, [0, 1, 2, 3], 4, 3, SPAN) == [0, 1, 2, 3, 4]


def test_a_layer_of_sinks_alone_has_them_right_before_the_chunk() -> None:
    assert place(Positions.ANCHOR, [0, 1], 12, 3, SPAN) == [10, 11, 12]


def test_renumber_by_hand_over_time() -> None:
    assert stride(SPAN) == 4
    assert [shift(end, SPAN) for end in (3, 14, 15, 18, 19, 100)] == [0, 0, 4, 4, 8, 88]


def test_renumber_stays_inside_the_table_and_behind_the_sinks() -> None:
    random.seed(0)
    for _ in range(300):
        sinks, reach = random.randrange(4), random.randrange(1, 9)
        span = Span(
            sink_size=sinks, reach=reach, max_position=sinks + reach + random.randrange(2, 12)
        )
        start = random.randrange(200)
        held = [f for f in range(start) if f < sinks or f >= start - reach]
        assert span.max_position is not None
        for count in range(1, span.max_position):
            if refusal(Positions.RENUMBER, len(held), start, count, span):
                break
            *kept, first = place(Positions.RENUMBER, held, start, count, span)
            assert first + count <= span.max_position and min([0, *kept]) >= 0
            assert len(set(kept)) == len(kept) and max([-1, *kept]) < max(first, sinks)
        else:
            pytest.fail("a chunk as long as the table was never refused")


@pytest.mark.parametrize(
    ("mode", "held", "start", "count", "refused"),
    [
        ("keep", 6, 11, 3, False),
        ("keep", 6, 12, 3, True),
        ("anchor", 6, 12, 3, True),
        ("relative", 6, 1000, 8, False),
        ("relative", 6, 1000, 9, True),
        ("recompute", 6, 1000, 9, True),
        ("renumber", 6, 1000, 4, False),
        ("renumber", 0, 0, 5, True),
    ],
)
def test_refusal_rule(mode: str, held: int, start: int, count: int, refused: bool) -> None:
    reason = refusal(Positions(mode), held, start, count, SPAN)
    assert (reason is not None) == refused
    unbounded = Span(sink_size=2, reach=4, max_position=None)
    if mode != "renumber":
        assert refusal(Positions(mode), held, start, count, unbounded) is None

"""The rolling cache against a list of all tokens; eviction, refusals, bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from diffcache.kv import RollingCache

Make = Callable[..., RollingCache]
FRAME_BYTES = 3 * 2 * 4 * 4  # tokens, heads, head_dim, fp32


def test_equals_a_list_of_all_tokens(make: Make, chunk: Any, reference: Any, in_time: Any) -> None:
    random.seed(1)
    for sink, window in [(0, 1), (0, 4), (1, 3), (3, 5), (2, 0)]:
        cache, kept = make(sink, window), [reference(sink, window) for _ in range(2)]
        for _ in range(25):
            frames = random.randrange(1, 7)
            for layer in range(2):
                view = cache.read(layer, frames)
                found, keys, values = in_time(view)
                assert found == kept[layer].visible() == cache.frames(layer)
                if found:
                    assert torch.equal(keys, torch.stack([kept[layer].keys[f] for f in found]))
                    assert torch.equal(values, torch.stack([kept[layer].values[f] for f in found]))
                assert view.mask is None and view.positions[0] == view.frames[0]
                keys, values = chunk(frames)
                cache.append(layer, keys, values)
                kept[layer].append(keys[0], values[0])


def test_items_of_different_lengths_equal_themselves_alone(
    make: Make, chunk: Any, in_time: Any
) -> None:
    random.seed(2)
    together, alone = make(batch_size=3), [make() for _ in range(3)]
    for _ in range(60):
        items = random.sample(range(3), random.randrange(1, 4))
        keys, values = chunk(random.randrange(1, 4), len(items))
        for layer in range(2):
            together.append(layer, keys, values, items=items)
            for row, item in enumerate(items):
                alone[item].append(layer, keys[row : row + 1], values[row : row + 1])
        view = together.read(0, 2)
        for item in range(3):
            found, expected = in_time(view, item), in_time(alone[item].read(0, 2))
            assert found[0] == expected[0]
            assert torch.equal(found[1], expected[1]) and torch.equal(found[2], expected[2])
    assert len({together.next_frame(0, item) for item in range(3)}) > 1


def test_a_shorter_item_is_masked_and_its_padding_cannot_be_seen(make: Make, chunk: Any) -> None:
    cache = make(batch_size=2)
    cache.append(0, *chunk(4, 1), items=[0])
    cache.append(0, *chunk(1, 1), items=[1])
    view = cache.read(0, 2)
    assert view.frames == ((0, 1, 2, 3), (0, -1, -1, -1))
    assert view.mask is not None and view.mask.sum(1).tolist() == [12, 3]
    assert not view.keys[1, 3:].any() and not view.values[1, 3:].any()
    query = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(3))
    keys, values = view.keys.transpose(1, 2), view.values.transpose(1, 2)
    padded = attention(query, keys, values, attn_mask=view.mask[:, None, None])
    short = attention(query[1:], keys[1:, :, :3], values[1:, :, :3])
    torch.testing.assert_close(padded[1:], short)


def test_eviction_writes_the_new_frame_and_moves_no_other(make: Make, chunk: Any) -> None:
    cache = make(1, 3)
    for _ in range(4):
        cache.append(0, *chunk(1))
    parts = cache._stores[0].parts
    pointers = {name: part.data_ptr() for name, part in parts.items()}
    for step in range(9):
        before, written = {n: p.clone() for n, p in parts.items()}, cache.bytes_written
        cache.append(0, *chunk(1))
        assert cache.bytes_written - written == 2 * FRAME_BYTES
        changed = [
            s for s in range(4) if not torch.equal(before["keys"][:, s], parts["keys"][:, s])
        ]
        assert changed == [1 + step % 3]
    assert {name: part.data_ptr() for name, part in parts.items()} == pointers
    assert cache.read(0, 1).keys.data_ptr() == pointers["keys"], "a full window is read in place"


def test_a_chunk_longer_than_the_window_writes_what_stays(make: Make, chunk: Any) -> None:
    cache = make(1, 3)
    cache.append(0, *chunk(9))
    assert cache.frames(0) == [0, 6, 7, 8] and cache.next_frame(0) == 9
    assert cache.bytes_written == 4 * 2 * FRAME_BYTES


def test_scopes_hold_what_their_table_promises(make: Make, chunk: Any) -> None:
    table = ("none", "recent_2", "anchor", "recent_4+anchor", "sink+window")
    cache = make(1, 3, num_layers=5, scopes=table)
    for _ in range(20):
        for layer in range(5):
            cache.append(layer, *chunk(1))
    kept = [cache.frames(layer) for layer in range(5)]
    assert kept == [[], [18, 19], [11, 17], [11, 16, 17, 18, 19], [0, 17, 18, 19]]
    assert cache.read(0, 1).keys.shape == (1, 0, 2, 4)
    assert [store.nbytes for store in cache._stores] == [
        2 * FRAME_BYTES * slots for slots in (0, 2, 2, 6, 4)
    ]


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16", "float8_e4m3", "int8"])
def test_bytes_are_the_formula_at_every_chunk(make: Make, chunk: Any, storage: str) -> None:
    cache = make(2, 3, batch_size=2, storage=storage, scopes=("sink+window", "recent_2"))
    numbers = {"float32": 16, "bfloat16": 8, "float16": 8, "float8_e4m3": 4 + 4, "int8": 4 + 4}
    expected = 2 * 2 * (5 + 2) * 3 * 2 * numbers[storage]  # K and V, items, slots, tokens, heads
    for _ in range(40):
        parts = [part for store in cache._stores for part in store.parts.values()]
        held = sum(part.untyped_storage().nbytes() for part in parts)
        assert cache.nbytes == cache.settings.nbytes() == held == expected
        for layer in range(2):
            cache.append(layer, *chunk(2, 2))


@pytest.mark.parametrize(
    ("mode", "limit", "frames", "refused"),
    # What is the longest that fits: the table's end; the table less 4 frames kept; half of what
    # one sink and three frames leave of it.
    [
        ("keep", 10, 6, 5),
        ("anchor", 10, 6, 5),
        ("relative", 7, 40, 4),
        ("recompute", 7, 4, 4),
        ("renumber", 10, 40, 4),
    ],
)
def test_growth_beyond_the_table_is_refused_before_anything_is_written(
    make: Make, chunk: Any, mode: str, limit: int, frames: int, refused: int
) -> None:
    cache = make(1, 3, positions=mode, max_position=limit)
    for _ in range(frames):
        cache.append(0, *chunk(1))
    before = cache.bytes_written, cache.next_frame(0), cache.frames(0)
    for call in (
        lambda: cache.append(0, *chunk(refused)),
        lambda: cache.read(0, refused),
        lambda: cache.check_room(refused),
    ):
        with pytest.raises(ValueError, match=r"rotary table|has room for chunks"):
            call()
    assert (cache.bytes_written, cache.next_frame(0), cache.frames(0)) == before
    cache.check_room(refused - 1)
    cache.read(0, refused - 1)
    cache.append(0, *chunk(refused - 1))


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [items, tokens, heads, 4] at one position per token [items, tokens]."""
    angles = positions[..., None, None] * torch.tensor([1.0, 0.1])
    turned = torch.view_as_complex(x.unflatten(-1, (2, 2))) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(-2)


@pytest.mark.parametrize("mode", ["keep", "relative", "anchor", "renumber"])
def test_attention_equals_that_over_the_list_at_positions_counted_there(
    make: Make, chunk: Any, reference: Any, mode: str
) -> None:
    cache, kept = make(2, 3, positions=mode, max_position=64), reference(2, 3)
    for _ in range(20):
        frames, end = kept.visible(), len(kept.keys)
        recent = [f for f in frames if f >= 2]
        behind = {
            # How far behind the chunk's first frame each visible frame stands.
            "keep": {f: end - f for f in frames},
            "relative": {f: len(frames) - n for n, f in enumerate(frames)},
            "anchor": {f: end - (f if f >= 2 else min([*recent, end]) - 2 + f) for f in frames},
            "renumber": {f: end - f for f in frames},
        }[mode]
        view, (query, _) = cache.read(0, 2), chunk(2)
        keys, values = chunk(2)
        if end >= 4:
            own = torch.tensor([[view.chunk_positions[0] + n // 3 for n in range(6)]])
            places = torch.tensor(view.positions).repeat_interleave(3, dim=1)
            all_keys = torch.cat([rotate(view.keys, places), rotate(keys, own)], 1)
            found = attend(rotate(query, own), all_keys, torch.cat([view.values, values], 1))
            listed = torch.cat([*(kept.keys[f] for f in frames), keys[0]])[None]
            where = [-behind[f] for f in frames for _ in range(3)] + [0, 0, 0, 1, 1, 1]
            listed_values = torch.cat([*(kept.values[f] for f in frames), values[0]])[None]
            turned = rotate(listed, torch.tensor([where]).float())
            expected = attend(rotate(query, own - own[0, 0]), turned, listed_values)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        cache.append(0, keys, values)
        kept.append(keys[0], values[0])


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return attention(*(x.transpose(1, 2) for x in (query, keys, values)))


@pytest.mark.parametrize("mode", ["relative", "renumber"])
def test_500_chunks_stay_inside_the_table(make: Make, chunk: Any, mode: str) -> None:
    cache = make(1, 3, positions=mode, max_position=10)
    for _ in range(500):
        view = cache.read(0, 2)
        last = view.chunk_positions[0] + 1
        assert max((*view.positions[0], last)) < 10 and min((*view.positions[0], last)) >= 0
        cache.append(0, *chunk(2))
        parts = [part for store in cache._stores for part in store.parts.values()]
        held = sum(part.untyped_storage().nbytes() for part in parts)
        assert cache.nbytes == cache.settings.nbytes() == held
    assert cache.next_frame(0) == 1000


def test_recompute_reads_nothing_until_the_frames_were_written_again(
    make: Make, chunk: Any, in_time: Any
) -> None:
    cache = make(1, 3, positions="recompute")
    cache.append(0, *chunk(4))
    assert cache.read(0, 1).positions == ((0, 1, 2, 3),)
    cache.append(0, *chunk(1))
    with pytest.raises(ValueError, match="recompute them without it and `rewrite`"):
        cache.read(0, 1)
    keys, values = chunk(4)
    cache.rewrite(0, cache.frames(0), keys, values)
    frames, found, _ = in_time(cache.read(0, 1))
    assert frames == [0, 2, 3, 4]
    assert torch.equal(found, keys[0].unflatten(0, (4, 3)))
    assert cache.read(0, 1).chunk_positions == (4,)


def test_rewrite_leaves_out_what_the_scope_dropped(make: Make, chunk: Any, in_time: Any) -> None:
    cache = make(0, 3, scopes=("window", "recent_1"))
    for layer in range(2):
        cache.append(layer, *chunk(3))
    keys, values = chunk(3)
    for layer in range(2):
        cache.rewrite(layer, [0, 1, 2], keys, values)
    assert torch.equal(in_time(cache.read(0, 1))[1].flatten(0, 1), keys[0])
    assert torch.equal(in_time(cache.read(1, 1))[1].flatten(0, 1), keys[0, 6:])


def test_stored_tensors_are_ours_and_carry_no_graph(make: Make, chunk: Any) -> None:
    cache = make()
    keys, values = (x.requires_grad_() for x in chunk(1))
    cache.append(0, keys, values)
    with torch.no_grad():
        keys.fill_(9.0)
    view = cache.read(0, 1)
    assert not view.keys.requires_grad and not (view.keys == 9).any()


def test_made_in_inference_mode_it_works_outside(make: Make, chunk: Any) -> None:
    with torch.inference_mode():
        cache = make()
        cache.append(0, *chunk(1))
    cache.append(0, *chunk(1))
    assert cache.frames(0) == [0, 1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window_size": -1}, "window_size must be an integer of at least 0, got -1"),
        ({"num_layers": 0}, "num_layers must be an integer of at least 1, got 0"),
        ({"positions": "absolute"}, "positions must be one of keep, relative"),
        ({"storage": "int4"}, "storage must be one of float32"),
        ({"scopes": ("none",)}, "scopes must name 2 layers, got 1"),
        ({"scopes": "recent"}, "a scope is 'none' or of"),
        ({"positions": "renumber"}, "needs max_position"),
        ({"positions": "renumber", "max_position": 5}, "must be at least 6 to renumber, got 5"),
        ({"positions": "recompute", "scopes": ("none", "sink")}, "the same scope in every layer"),
    ],
)
def test_bad_settings_are_refused(make: Make, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_bad_calls_are_refused(make: Make, chunk: Any) -> None:
    cache, (keys, values) = make(batch_size=2), chunk(2, 2)
    with pytest.raises(ValueError, match=r"keys must be \[2, frames \* 3, 2, 4\], got"):
        cache.append(0, keys[:, :4], values[:, :4])
    with pytest.raises(ValueError, match="values must be"):
        cache.append(0, keys, values[:, :3])
    with pytest.raises(ValueError, match="items must be different ones of 0 to 1"):
        cache.append(0, keys, values, items=[0, 2])
    for call in (
        lambda: cache.append(-1, keys, values),
        lambda: cache.read(2, 1),
        lambda: cache.rewrite(2, [0], keys, values),
        lambda: cache.read(-1, 1),
    ):
        with pytest.raises(ValueError, match="layer must be one of 0 to 1, got"):
            call()
    with pytest.raises(ValueError, match="at least one frame"):
        cache.read(0, 0)
    with pytest.raises(ValueError, match="only frames before 0 can be rewritten"):
        cache.rewrite(0, [0, 1], keys, values)
    with pytest.raises(ValueError, match="keys hold 2 frames"):
        cache.rewrite(0, [0], keys, values)
    assert cache.bytes_written == 0

"""States from damaged files are refused whole; running out of memory half-way changes nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from diffcache.kv import RollingCache
from diffcache.kv.store import SlotStore

Make = Callable[..., RollingCache]
FORMS: list[dict[str, Any]] = [
    {"storage": "int8", "page_tokens": 3},
    {"storage": "float8_e4m3", "device_size": 2},
    {"storage": "bfloat16", "positions": "recompute"},
    {"scopes": ("none", "recent_2+anchor")},
]


def content(cache: RollingCache) -> Any:
    """Everything in it, tensors as lists."""
    state = cache.state_dict()
    layers = [{n: part.float().tolist() for n, part in row.items()} for row in state["layers"]]
    return state["numbers"], layers


def save(state: dict[str, Any], path: Path) -> None:
    tensors = {f"{n}.{k}": t for n, row in enumerate(state["layers"]) for k, t in row.items()}
    plain = {name: state[name] for name in ("format", "settings", "numbers")}
    save_file(tensors, path, metadata={"state": json.dumps(plain)})


def load(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        state = json.loads(file.metadata()["state"])
        layers: list[dict[str, torch.Tensor]] = [{} for _ in state["numbers"]]
        for key in file.keys():  # noqa: SIM118
            layer, _, name = key.partition(".")
            layers[int(layer)][name] = file.get_tensor(key)
    return {**state, "layers": layers}


@pytest.mark.parametrize("form", FORMS)
def test_a_state_goes_through_safetensors(
    make: Make, chunk: Any, tmp_path: Path, form: dict[str, Any]
) -> None:
    cache, other = make(1, 3, **form), make(1, 3, **form)
    for layer in range(2):
        cache.append(layer, *chunk(5))
    save(cache.state_dict(), tmp_path / "state.safetensors")
    other.load_state_dict(load(tmp_path / "state.safetensors"))
    assert content(other) == content(cache)
    keys, values = chunk(2)
    for one in (cache, other):
        one.append(1, keys, values)
    assert content(other) == content(cache)


def test_a_file_cut_short_does_not_open(make: Make, tmp_path: Path) -> None:
    save(make().state_dict(), tmp_path / "state.safetensors")
    whole = (tmp_path / "state.safetensors").read_bytes()
    (tmp_path / "state.safetensors").write_bytes(whole[:-10])
    with pytest.raises(SafetensorError):
        load(tmp_path / "state.safetensors")


Damage = Callable[[dict[str, Any]], Any]


def ring(**numbers: Any) -> Damage:
    return lambda state: state["numbers"][0][0].update(numbers)


def meta(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: part.to("meta") for name, part in parts.items()}


DAMAGE: dict[str, Damage] = {
    "no settings": lambda s: s.pop("settings"),
    "settings of another form": lambda s: s.update(settings=[1]),
    "a setting nobody knows": lambda s: s["settings"].update(dilation=2),
    "no numbers": lambda s: s.pop("numbers"),
    "no layers": lambda s: s.update(layers=None),
    "a layer too few": lambda s: s["layers"].pop(),
    "numbers of a layer too few": lambda s: s["numbers"].pop(),
    "an item too few": lambda s: s["numbers"][0].pop(),
    "numbers of another form": lambda s: s["numbers"].__setitem__(0, [3]),
    "a number too many": ring(other=1),
    "a number missing": lambda s: s["numbers"][0][0].pop("end"),
    "a slot too few": lambda s: s["numbers"][0][0]["frames"].pop(),
    "a frame twice": ring(frames=[0, 2, 3, 3]),
    "a frame that was never made": ring(frames=[0, 2, 3, 9]),
    "a frame that had left": ring(frames=[0, 1, 3, 4]),
    "a frame missing": ring(frames=[0, 2, -1, 4]),
    "a frame below none": ring(frames=[0, 2, -5, 4]),
    "frames as text": ring(frames=list("0234")),
    "frames as fractions": ring(frames=[0.0, 2.0, 3.0, 4.0]),
    "frames as truths": ring(frames=[False, 2, 3, 4]),
    "an old frame on the device": lambda s: s["numbers"][0][0]["frames"].reverse(),
    "an end below nought": ring(end=-1),
    "an end that is none": ring(end=None),
    "an end too far": ring(end=10**18),
    "stale without reason": ring(stale=[0]),
    "a part too few": lambda s: s["layers"][0].pop("keys_scale"),
    "a part too many": lambda s: s["layers"][0].update(bias=torch.zeros(1)),
    "a part of another shape": lambda s: s["layers"][1].update(keys=torch.zeros(1)),
    "a part of another type": lambda s: s["layers"][1].update(keys=s["layers"][1]["keys"].float()),
    "a part without numbers": lambda s: s["layers"][1].update(
        keys=s["layers"][1]["keys"].to("meta")
    ),
    "a part that is no tensor": lambda s: s["layers"][1].update(keys=[1]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_state_is_refused_and_changes_nothing(
    make: Make, chunk: Any, damage: str
) -> None:
    form = {"storage": "int8", "device_size": 2}
    cache, whole = make(1, 3, **form), make(1, 3, **form)
    for layer in range(2):
        whole.append(layer, *chunk(5))
        cache.append(layer, *chunk(7))
    state, before = copy.deepcopy(whole.state_dict()), content(cache)
    snapshot = cache.snapshot()
    DAMAGE[damage](state)
    with pytest.raises(ValueError, match=r"damaged|needs a cache|no settings"):
        cache.load_state_dict(state)
    assert content(cache) == before and snapshot.nbytes == 0
    cache.load_state_dict(whole.state_dict())
    assert content(cache) == content(whole)


@pytest.mark.parametrize("state", [None, 3, [], {}, {"format": 2}])
def test_what_is_no_state_is_refused(make: Make, state: Any) -> None:
    with pytest.raises(ValueError, match="format must be 1, got"):
        make().load_state_dict(state)


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_stale_frames_are_believed_only_where_there_can_be_some(
    make: Make, chunk: Any, mode: str
) -> None:
    cache = make(1, 3, positions=mode)
    cache.append(0, *chunk(5))
    state = cache.state_dict()
    assert state["numbers"][0][0]["stale"] == ([0, 2, 3, 4] if mode == "recompute" else [])
    cache.load_state_dict(state)
    state["numbers"][0][0]["stale"] = [1]
    with pytest.raises(ValueError, match="can never have had"):
        cache.load_state_dict(state)


@pytest.mark.parametrize(
    ("call", "method"),
    [
        ("append", "encode"),
        ("rewrite", "encode"),
        ("append", "take"),
        ("rewrite", "take"),
        ("rollback", "take"),
        ("load_state_dict", "take"),
    ],
)
@pytest.mark.parametrize("form", FORMS[:3])
def test_out_of_memory_changes_nothing_and_the_call_works_again(
    make: Make,
    chunk: Any,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    method: str,
    form: dict[str, Any],
) -> None:
    cache, twin = make(1, 3, **form), make(1, 3, **form)
    first, second, third = chunk(4), chunk(2), chunk(4)
    moments = []
    for one in (cache, twin):
        one.append(0, *first)
        moments.append([one.snapshot()])
        if call != "rewrite":
            one.append(0, *second)
        moments[-1].append(one.snapshot())
    state = twin.state_dict()

    def do(one: RollingCache, taken: Any) -> None:
        if call == "append":
            one.append(0, *third)
        elif call == "rewrite":
            one.rewrite(0, [0, 1, 2, 3], *third)
        elif call == "rollback":
            one.rollback(taken[0])
        else:
            one.load_state_dict(state)

    before, works = content(cache), getattr(SlotStore, method)
    left = [1 if method == "take" else 0]  # the second copy for a snapshot fails, or the first code

    def fails(self: SlotStore, *args: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise torch.OutOfMemoryError("out of memory")
        return works(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(SlotStore, method, fails)
        with pytest.raises(torch.OutOfMemoryError):
            do(cache, moments[0])
    assert content(cache) == before
    do(cache, moments[0])
    do(twin, moments[1])
    assert content(cache) == content(twin)
    for n in (1, 0):
        cache.rollback(moments[0][n])
        twin.rollback(moments[1][n])
        assert content(cache) == content(twin)

"""Diffusers' own chunk by chunk pipelines: chunks are told, and no history outlives its chunk."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch
from tiny_chunked import STEPS, TINIES, skyreels
from toys import every_second_chunk, fitting, lively

import diffcache
from diffcache.features.cell import Cell
from diffcache.pipelines.chunked import CHUNKED, chunk_rule
from diffcache.progress import ChunkRule


def fast(*names):
    """Every policy that skips; all but those named with -m slow only."""
    every = [name for name in diffcache.policies() if name != "exact"]
    return [pytest.param(n, marks=[] if n in names else pytest.mark.slow) for n in every]


POLICIES, FIRST, SECOND = fast("hold", "first_block"), fast("hold"), fast("first_block")
# What the face adapter adds between blocks is read off their outputs: no site of blocks there.
BLOCKS_REFUSED = {"WanAnimatePipeline"}
IN_BLOCKS = {"first_block", "teacache", "taylorseer", "magcache", "dbcache"}

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without")


@lru_cache(None)
def tiny(name):
    return TINIES[name]()


@lru_cache(None)
def plain(name):
    """What the pipeline gives without us."""
    return tiny(name).run(tiny(name).make())


def wrapped(name, policy):
    return diffcache.wrap(tiny(name).make(), policy)


def denoising(pipe):
    """The rows of the last run's denoising passes."""
    return [row for row in diffcache.report(pipe).rows if row.reason != "kv_write"]


@pytest.fixture
def histories(monkeypatch):
    """Watches every cell: (chunk in which a step was remembered, chunk in which it was used)."""
    used, held = [], WeakKeyDictionary()
    push, predict, clear = Cell.push, Cell.predict, Cell.clear

    def pushing(cell, context, *args, **kwargs):
        held.setdefault(cell, []).append(context.chunk)
        return push(cell, context, *args, **kwargs)

    def predicting(cell, context, like):
        used.extend((chunk, context.chunk) for chunk in held[cell])
        return predict(cell, context, like)

    def clearing(cell):
        held.pop(cell, None)
        clear(cell)

    monkeypatch.setattr(Cell, "push", pushing)
    monkeypatch.setattr(Cell, "predict", predicting)
    monkeypatch.setattr(Cell, "clear", clearing)
    return used


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", TINIES)
def test_chunks_are_told_and_nothing_leaks(name, policy, histories):
    """Each chunk begins with a computed step 0 in every branch and reuses its own steps alone."""
    pipe, case = wrapped(name, lively(policy)), tiny(name)
    output = case.run(pipe)
    rows = denoising(pipe)
    assert list(dict.fromkeys(row.chunk for row in rows)) == list(range(case.chunks))
    for index in range(case.chunks):
        mine = [row for row in rows if row.chunk == index]
        branches = list(dict.fromkeys(row.branch for row in mine))
        assert len(branches) == case.passes
        for branch in branches:
            row = next(row for row in mine if row.branch == branch)
            assert (row.decision, row.step) == ("compute", 0)
        steps = {(row.branch, row.timestep) for row in mine}
        assert len(steps) <= case.passes * case.steps[index]
    assert {a == b for a, b in histories} <= {True}
    refused = name in BLOCKS_REFUSED and policy in IN_BLOCKS
    chunks = {row.chunk for row in rows if row.decision == "reuse"}
    assert chunks == (set() if refused else set(range(case.chunks)))
    assert torch.equal(output, plain(name)) == refused


@pytest.mark.parametrize("policy", SECOND)
@pytest.mark.parametrize("name", TINIES)
def test_exact_settings_change_no_bit(name, policy):
    """With the policy's exact settings the result is that of a pipeline never wrapped."""
    exact = fitting(policy)
    pipe = wrapped(name, exact.with_settings(**exact.exact))
    assert torch.equal(tiny(name).run(pipe), plain(name))
    assert {row.decision for row in diffcache.report(pipe).rows} == {"compute"}


@pytest.mark.parametrize("policy", FIRST)
@pytest.mark.parametrize("name", TINIES)
def test_runs_are_alike(name, policy):
    """Two runs are equal, with one between them that is broken off in its second chunk; each
    report holds one run: a row for each pass of each step, and one for each write.
    """
    pipe, case = wrapped(name, lively(policy)), tiny(name)
    expected = case.run(pipe)
    assert_one_run(pipe, case)
    calls, stop = [], case.passes * case.steps[0] + len(case.writes) + 4

    def cancel(*_):
        calls.append(None)
        if len(calls) > stop:
            raise InterruptedError

    handle = pipe.transformer.register_forward_pre_hook(cancel)
    with pytest.raises(InterruptedError):
        case.run(pipe)
    handle.remove()
    assert torch.equal(case.run(pipe), expected)
    assert_one_run(pipe, case)


def assert_one_run(pipe, case):
    calls = [row for row in diffcache.report(pipe).rows if row.seconds]  # one for each call
    counts = Counter(row.chunk for row in calls if row.reason != "kv_write")
    assert counts == {i: case.passes * case.steps[i] for i in range(case.chunks)}
    writes = [row for row in calls if row.reason == "kv_write"]
    assert tuple(row.chunk for row in writes) == case.writes
    assert {row.decision for row in writes} <= {"compute"}


@pytest.mark.parametrize("name", TINIES)
def test_unwrap_takes_the_listeners_off(name):
    """The pipeline's own methods are back, and the transformer's."""
    pipe = tiny(name).make()
    before = [dict(vars(pipe)), dict(vars(pipe.transformer))]
    diffcache.wrap(pipe, "hold")
    assert CHUNKED[name].run in vars(pipe)
    diffcache.unwrap(pipe)
    assert [dict(vars(pipe)), dict(vars(pipe.transformer))] == before


@pytest.mark.parametrize("name", ["AnyFlowFARPipeline", "SanaWMLTX2Refiner"])
def test_clean_passes_reach_the_model(name):
    """Every pass that writes keys and values runs in full; the cache is not kept as history."""
    seen, case = [], tiny(name)
    pipe = case.make()
    forward = pipe.transformer.forward

    def watched(*args, **kwargs):
        flag, mode = kwargs.get("kv_cache_flag"), kwargs.get("kv_cache_mode", "")
        seen.append(flag["is_cache_step"] if flag else "capture" in mode)
        return forward(*args, **kwargs)

    pipe.transformer.forward = watched
    diffcache.wrap(pipe, "hold")
    case.run(pipe)
    computed = [row for row in denoising(pipe) if row.decision == "compute"]
    assert sum(seen) == len(case.writes)
    assert len(seen) - sum(seen) == len(computed) < case.chunks * STEPS
    # Two steps of one output, at most: far below one layer's keys and values.
    assert diffcache.report(pipe).summary["bytes_peak"] <= 2 * 4 * 4 * 2 * 16


def test_stages_of_a_pyramid_stay_in_their_chunk(histories):
    """Helios: the second stage has another shape and begins anew, within the same chunk."""
    pipe = wrapped("HeliosPyramidPipeline", "hold")
    tiny("HeliosPyramidPipeline").run(pipe)
    for index in range(3):
        mine = [row for row in denoising(pipe) if (row.chunk, row.branch) == (index, "cond")]
        assert [row.step for row in mine] == 2 * list(range(STEPS))
        assert [mine[i].decision for i in (0, STEPS)] == ["compute"] * 2
    assert histories


def test_frames_at_times_of_their_own_are_computed(histories):
    """SkyReels-V2 with lagging blocks: no single time, so those steps are computed and say so."""
    case = skyreels(ar_step=3, causal_block_size=1, base_num_frames=13, num_frames=13)
    expected = case.run(case.make())
    exact = fitting("hold")
    pipe = diffcache.wrap(case.make(), exact.with_settings(**exact.exact))
    assert torch.equal(case.run(pipe), expected)
    pipe = diffcache.wrap(case.make(), "hold")
    case.run(pipe)
    rows = denoising(pipe)
    reasons = Counter(row.reason for row in rows)
    assert reasons["no single time"] > len(rows) // 2
    assert {row.chunk for row in rows} == {0}


def test_noise_on_carried_frames_is_no_single_time():
    """SkyReels-V2 with `addnoise_condition`: windows after the first are computed in full."""
    case = skyreels(addnoise_condition=20)
    pipe = diffcache.wrap(case.make(), "hold")
    torch.manual_seed(0)  # this noise is drawn from the global generator
    case.run(pipe)
    rows = denoising(pipe)
    assert {row.chunk for row in rows if row.decision == "reuse"} == {0}
    assert {row.reason for row in rows if row.chunk} == {"no single time"}


def test_the_chunk_axis_counts_the_pipelines_chunks():
    """A policy over chunks reuses the same step of the chunk before, in every second chunk."""
    pipe = wrapped("HeliosPipeline", every_second_chunk())
    tiny("HeliosPipeline").run(pipe)
    decisions = [{row.decision for row in denoising(pipe) if row.chunk == i} for i in range(3)]
    assert decisions == [{"compute"}, {"reuse"}, {"compute"}]


def test_the_users_own_chunk_comes_first():
    """Inside `diffcache.chunk` rows carry that index, and inner chunks still begin anew."""
    pipe = wrapped("LTXI2VLongMultiPromptPipeline", "hold")
    expected = tiny("LTXI2VLongMultiPromptPipeline").run(pipe)
    with diffcache.chunk(pipe, 7):
        assert torch.equal(tiny("LTXI2VLongMultiPromptPipeline").run(pipe), expected)
    rows = denoising(pipe)
    assert {row.chunk for row in rows} == {7}
    assert [row.step for row in rows] == 3 * list(range(STEPS))


def test_rules():
    """Subclasses follow their base's rule; a rule says in one way where chunks begin."""
    pipe = tiny("HeliosPipeline").make()
    assert chunk_rule(type("Own", (type(pipe),), {}).__new__(type(pipe))) is not None
    assert chunk_rule(object()) is None
    for wrong in ({}, {"chunk": "prepare_latents", "after_write": True}):
        with pytest.raises(ValueError, match="exactly one"):
            ChunkRule(run="check_inputs", **wrong)


@pytest.mark.parametrize("name", CHUNKED)
def test_rules_name_methods_that_exist(name):
    """A renamed method would otherwise be noticed by a user first."""
    import diffusers
    from diffusers.pipelines.sana_wm import refiner

    cls = getattr(diffusers, name, None) or getattr(refiner, name)
    rule = CHUNKED[name]
    assert all(callable(getattr(cls, method)) for method in (rule.run, rule.chunk or rule.run))


def test_the_table_tells_of_every_rule():
    """CHUNKS.md has one row for each class, and each row's test stands in this file."""
    import diffcache.pipelines.chunked as module

    text = (Path(module.__file__).parent / "CHUNKS.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in text.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(row[0] for row in rows))) == sorted(CHUNKED)
    for row in rows:
        for test in re.findall(r"`(test_\w+)`", row[-1]):
            assert callable(globals()[test])
        assert re.search(r"`test_\w+`", row[-1]), row[0]

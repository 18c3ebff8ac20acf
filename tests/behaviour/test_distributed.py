"""Two processes that share one video, or work on two: real gloo ranks with different numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LIMIT = 180  # seconds: ranks that wait for each other for ever fail, they do not hang


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What ranks.py saw in each of the two processes, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = [str(HERE), str(HERE.parent / "shared"), str(HERE.parents[1]), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(HERE / "ranks.py"), str(rank), str(folder / "store"), str(out)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=(folder / f"{rank}.err").open("w"),
        )
        for rank, out in enumerate((folder / "0.json", folder / "1.json"))
    ]
    try:
        codes = [process.wait(LIMIT) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0], [(folder / f"{rank}.err").read_text()[-2000:] for rank in (0, 1)]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def kinds(decisions):
    return [decision for decision, _ in decisions]


@pytest.mark.peer_row(14)
def test_ranks_with_different_metrics_take_the_same_branch(ranks):
    """vllm-omni #6180: one rank skips, the other computes, both wait for ever."""
    differed = overruled = 0
    for case, zero in ranks[0]["forced_apart"].items():
        one = ranks[1]["forced_apart"][case]
        assert kinds(zero["shared"]) == kinds(one["shared"]), case
        assert "reuse" in kinds(zero["shared"]), case
        differed += kinds(zero["alone"]) != kinds(one["alone"])
        overruled += "another rank computes" in str((zero["shared"], one["shared"]))
    assert differed >= 3 and overruled >= 3  # the inputs do force the ranks apart


@pytest.mark.peer_row(14)
@pytest.mark.peer_row(29)
def test_a_nan_on_one_rank_makes_all_compute(ranks):
    """The same where a static table is followed and one rank's part holds a NaN."""
    for site in ("stack", "block", "model"):
        zero, one = (found["not_finite"][site] for found in ranks)
        assert kinds(zero["alone"]) != kinds(one["alone"])
        assert kinds(zero["shared"]) == kinds(one["shared"])
        assert ["compute", "another rank computes"] in zero["shared"]
        assert any("finite" in reason for _, reason in one["shared"])


@pytest.mark.peer_row(14)
def test_ranks_extrapolate_alike(ranks):
    """Errors are compared over all ranks: an adaptive predictor takes one order everywhere."""
    assert ranks[0]["orders"] == ranks[1]["orders"] and ranks[0]["orders"][0]


@pytest.mark.peer_row(14)
def test_ranks_that_work_on_different_videos_are_left_alone(ranks):
    """Data parallelism: own decisions, own numbers of calls, nobody waits for anybody."""
    zero, one = (found["data_parallel"] for found in ranks)
    assert len(zero) == 12 and len(one) == 7
    assert kinds(zero)[:7] != kinds(one)
    assert "another rank" not in str((zero, one))


@pytest.mark.peer_row(14)
def test_ranks_that_share_weights_decide_together(ranks):
    """FSDP: the videos differ, but each block that runs gathers its weights from all ranks."""
    zero, one = (found["sharded_weights"] for found in ranks)
    alone = [kinds(found["forced_apart"]["first_block stack"]["alone"]) for found in ranks]
    assert kinds(zero) == kinds(one) and alone[0] != alone[1]
    assert "another rank computes" in str((zero, one)) and "reuse" in kinds(zero)


@pytest.mark.peer_row(14)
def test_a_group_is_given_by_its_name(ranks):
    """`ranks=group.group_name`; a name that no group has is an error with the remedy."""
    zero, one = (found["named"] for found in ranks)
    assert kinds(zero["decisions"]) == kinds(one["decisions"])
    assert "another rank computes" in str((zero, one))
    assert "'nobody'" in zero["refused"] and "'world'" in zero["refused"]


@pytest.mark.peer_row(14)
@pytest.mark.parametrize("first", ["wrap", "parallel"])
@pytest.mark.parametrize("name", ["first_block", "hold stack", "hold block", "balanced"])
def test_context_parallelism_of_diffusers(ranks, name, first):
    """`enable_parallelism` before or after wrap: seen without being told, and steps are skipped."""
    zero, one = (found["context_parallel"][f"{name}, {first}"] for found in ranks)
    plain = ranks[0]["context_parallel"][f"{name}, plain"]
    assert kinds(zero["decisions"]) == kinds(one["decisions"])
    assert "reuse" in kinds(zero["decisions"]) and zero["sums"] == one["sums"]
    if name == "first_block":
        assert zero["metrics"][3] < 0.067 < one["metrics"][3]
        assert zero["decisions"][3] == ["compute", "another rank computes"]
    else:
        assert kinds(zero["decisions"]) == kinds(plain["decisions"])
        assert zero["sums"] == pytest.approx(plain["sums"], rel=1e-5)

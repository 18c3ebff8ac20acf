"""`diffcache inspect` tells from shapes alone what a run then holds."""

import pytest

import diffcache as dc
from diffcache.cli.demo_run import (
    Method,
    Task,
    one_thread,
    pipeline_for,
    run_clip,
)
from diffcache.cli.loading import load_pipeline

SIZE = ("--height", "32", "--width", "32", "--frames", "5")


def inspected(diffcache, folder, policy):
    ran = diffcache("inspect", folder, "--policy", policy, *SIZE, "--steps", "12", "--json")
    assert ran.code == 0, ran.err
    return ran.json()["denoisers"][0]


def test_a_folder_shows_blocks_sites_and_the_contract(diffcache, tiny_demo):
    found = inspected(diffcache, tiny_demo, "balanced")
    assert found["name"] == "transformer"
    assert found["class"] == "WanTransformer3DModel"
    assert found["block_lists"] == [{"path": "blocks", "blocks": 4, "class": "WanTransformerBlock"}]
    assert found["latents"] == [1, 4, 2, 8, 8]
    assert found["contract_observed"] and found["problem"] is None
    tokens = 2 * 4 * 4
    assert found["sites"] == {
        "model": {"regions": 1, "bytes": 4 * 2 * 8 * 8 * 2},
        "stack": {"regions": 1, "bytes": tokens * 24 * 2},
        "block": {"regions": 4, "bytes": 4 * tokens * 24 * 2},
    }
    assert "blocks: 4 x WanTransformerBlock" in diffcache("inspect", tiny_demo, *SIZE).out


def test_the_word_demo_is_the_packaged_model(diffcache, tiny_demo, monkeypatch):
    monkeypatch.setattr("diffcache.cli.inspect_target.demo_model_path", lambda: tiny_demo)
    assert inspected(diffcache, "demo", "balanced") == inspected(diffcache, tiny_demo, "balanced")


@pytest.mark.peer_row(18)
@pytest.mark.filterwarnings("ignore::diffcache.errors.DiffcacheWarning")
@pytest.mark.parametrize("policy", ["hold", "forecast", "easycache", "first_block", "taylorseer"])
def test_the_bytes_are_those_that_a_run_holds(diffcache, tiny_demo, policy):
    task = Task.read(tiny_demo, prompts=1, steps=12)
    pipe = pipeline_for(Method(policy, policy), load_pipeline(tiny_demo))
    with one_thread():
        clip = run_clip(pipe, task, 0, steps=12)
    found = inspected(diffcache, tiny_demo, policy)["policy"]
    branches, float32_for_bfloat16 = 2, 2
    held = clip.report.summary["bytes_peak"]
    assert found["bytes_per_branch"] * branches * float32_for_bfloat16 == held
    if found["computed"] is not None and not found["may_compute_more"]:
        most = found["computed"] + 2  # two more to observe and check the blocks
        assert found["computed"] <= clip.computed <= most


def test_a_class_is_built_from_its_defaults(diffcache):
    ran = diffcache("inspect", "WanTransformer3DModel", *SIZE, "--json")
    found = ran.json()["denoisers"][0]
    assert found["block_lists"][0]["blocks"] == 40
    assert found["parameters"] > 10e9


def test_what_cannot_be_known_is_said(diffcache):
    found = diffcache("inspect", "FluxTransformer2DModel", "--json").json()["denoisers"][0]
    assert found["problem"] and not found["contract_observed"]
    assert found["policy"]["bytes_per_branch"] is None
    assert "not known" in diffcache("inspect", "FluxTransformer2DModel").out


def test_a_site_that_does_not_fit_is_said(diffcache, tiny_demo, tmp_path):
    policy = dc.get_policy("first_block", front=9)
    policy.save(tmp_path / "deep.json")
    found = inspected(diffcache, tiny_demo, tmp_path / "deep.json")
    assert "below the number of blocks (4)" in found["problem"]


@pytest.mark.parametrize("policy", sorted(dc.policies()))
def test_every_policy_can_be_inspected_on_the_demo_model(diffcache, policy):
    found = inspected(diffcache, "demo", policy)
    assert found["policy"]["name"] == policy
    assert found["problem"] is None and found["policy"]["bytes_per_branch"] > 0

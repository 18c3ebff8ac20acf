"""One pipeline serves request after request: any steps, size, batch, prompt, and cancelled ones."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from tiny_pipelines import embeddings, video_to_video
from toys import COND, SITES, Bare, latents, reused, rows

import diffcache


@pytest.mark.peer_row(7)
@pytest.mark.peer_row(8)
@pytest.mark.peer_row(9)
@pytest.mark.parametrize("name", ["hold", "first_block", "taylorseer", "balanced"])
def test_requests_of_any_kind_follow_each_other(name, tiny_wan, run_tiny):
    """cache-dit #540: the step count had to be known, or state leaked into the next request.

    sglang PR #17140: an old residual of another size; sglang PR #16490: a warm-up call was taken
    for a request. Here: a warm-up of 1 step at another size, then 4, 50 and 28 steps, sizes and
    batches changing, each as in a fresh process.
    """
    pipe = diffcache.wrap(tiny_wan(), name)
    for call in (
        {"steps": 1, "size": 4},
        {"steps": 4, "size": 12},
        {"steps": 50, "guidance": 1.0},
        {"steps": 28, "guidance": 1.0},
        {"steps": 8, "batch": 2},
        {"steps": 20, "frames": 3},
        {"steps": 20},
    ):
        expected = run_tiny(diffcache.wrap(tiny_wan(), name), **call)
        assert torch.equal(run_tiny(pipe, **call), expected), call


@pytest.mark.peer_row(8)
@pytest.mark.parametrize("site", SITES)
def test_shapes_change_within_a_run(site):
    """TeaCache #37: size mismatch at another resolution.

    A batch, a length and a dtype that change between two steps: computed, no exception.
    """
    times = iter(1000.0 - 20 * i for i in range(40))
    module, plain = diffcache.wrap(Bare(), "hold", site=site, warmup_steps=1), Bare()
    for shape in ({}, {"batch": 2}, {"tokens": 7}, {"dtype": torch.float64}, {}):
        dtype = shape.pop("dtype", torch.float32)
        x, cond = latents(**shape).to(dtype), COND.to(dtype)
        module.to(dtype)
        plain.to(dtype)
        t = next(times)
        assert torch.equal(module(x, t, cond), plain(x, t, cond))
        assert rows(module)[-1].decision == "compute"
        for _ in range(5):
            assert module(x, next(times), cond).shape == x.shape
        assert reused(module) > 0


@pytest.mark.peer_row(20)
@pytest.mark.parametrize("steps", [10, 20, 27, 50])
def test_any_number_of_steps_is_cached(steps, tiny_wan, run_tiny):
    """ComfyUI-MagCache #33: only certain step counts were allowed.

    No curve is tied to one step count; the share that is computed stays the same.
    """
    pipe = diffcache.wrap(tiny_wan(), "hold", fraction=0.4)
    run_tiny(pipe, steps=steps, guidance=1.0)
    computed = diffcache.report(pipe).summary["computed"]["cond"]
    assert abs(computed - 0.4 * steps) <= 0.5


@pytest.mark.peer_row(22)
def test_few_steps_per_chunk_are_computed(tiny_wan, run_tiny):
    """ComfyUI-MagCache #7: chunked video of few steps, residual None, severe loss of quality.

    Chunks of 4 steps: off by default; forced, each chunk still begins with a computed step.
    """
    for forced in (False, True):
        settings = {"min_steps": 0, "warmup_steps": 1, "tail_steps": 0} if forced else {}
        pipe = diffcache.wrap(tiny_wan(), "hold", **settings)
        for index in range(3):
            with diffcache.chunk(pipe, index):
                run_tiny(pipe, steps=4, guidance=1.0, seed=index)
            assert rows(pipe)[-4].decision == "compute" and rows(pipe)[-4].chunk == index
        assert (reused(pipe) > 0) == forced


@pytest.mark.peer_row(27)
@pytest.mark.parametrize("name", ["hold", "first_block", "taylorseer", "balanced"])
def test_few_steps_are_not_cached_unless_forced(name, tiny_wan, run_tiny):
    """WanVideoWrapper #811: caching hurt distilled models of 4 to 8 steps.

    4 and 7 steps are exact by default; `min_steps=0` forces.
    """
    for steps in (4, 7):
        pipe = diffcache.wrap(tiny_wan(), name)
        assert torch.equal(run_tiny(pipe, steps=steps), run_tiny(tiny_wan(), steps=steps))
    forced = {"min_steps": 0, "warmup_steps": 1}
    forced |= {"threshold": 1.0} if name == "first_block" else {"tail_steps": 0}
    pipe = diffcache.wrap(tiny_wan(), name, **forced)
    run_tiny(pipe, steps=7)
    assert reused(pipe) > 0


def test_wrapping_again_takes_up_the_new_settings(tiny_wan, run_tiny):
    """Threshold 0, then 0.9: steps are skipped from then on."""
    pipe = diffcache.wrap(tiny_wan(), "first_block", threshold=0.0)
    run_tiny(pipe)
    assert reused(pipe) == 0
    diffcache.wrap(pipe, "first_block", threshold=0.9)
    run_tiny(pipe)
    assert reused(pipe) > 0


@pytest.mark.peer_row(7)
@pytest.mark.parametrize("name", ["hold", "first_block", "taylorseer", "balanced"])
def test_a_denoiser_wrapped_alone_begins_anew_with_each_video(name, tiny_wan, run_tiny):
    """vllm-omni #2194: without a step count the cache was off, or its state leaked.

    Only the transformer is wrapped and no step count told: each run is as in a fresh process.
    """
    settings = {"threshold": 0.5} if name == "first_block" else {}

    def fresh(steps, seed):
        pipe = tiny_wan()
        diffcache.wrap(pipe.transformer, name, **settings)
        return run_tiny(pipe, steps=steps, seed=seed), reused(pipe.transformer)

    pipe = tiny_wan()
    diffcache.wrap(pipe.transformer, name, **settings)
    for steps, seed in ((4, 0), (28, 1), (50, 1), (12, 2), (1, 3), (8, 2)):
        expected, count = fresh(steps, seed)
        assert torch.equal(run_tiny(pipe, steps=steps, seed=seed), expected)
        assert reused(pipe.transformer) == count
        assert diffcache.report(pipe.transformer).rows[0].decision == "compute"


@pytest.mark.peer_row(10)
@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize("name", ["hold", "first_block", "taylorseer"])
def test_a_cancelled_run_leaves_nothing_behind(name, size, tiny_wan, run_tiny):
    """unsloth PR #6703: after a cancelled run the next one began with stale state.

    Cancelled in a callback, then the same size or another one: as on a fresh pipeline.
    """

    def cancel(pipe, index, t, tensors):
        if index == 6:
            raise KeyboardInterrupt
        return tensors

    pipe = diffcache.wrap(tiny_wan(), name)
    with pytest.raises(KeyboardInterrupt):
        run_tiny(pipe, callback_on_step_end=cancel)
    expected = run_tiny(diffcache.wrap(tiny_wan(), name), size=size, seed=1)
    assert torch.equal(run_tiny(pipe, size=size, seed=1), expected)


@pytest.mark.peer_row(9)
@pytest.mark.parametrize("name", ["hold", "first_block", "taylorseer", "balanced"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_warm_up_call_leaves_no_trace(name, steps, tiny_wan, run_tiny):
    """vllm-omni PR #2240: the server's warm-up call of one step poisoned the first request."""
    pipe = diffcache.wrap(tiny_wan(), name)
    warm = run_tiny(pipe, steps=steps, size=4, seed=3)
    assert torch.equal(warm, run_tiny(tiny_wan(), steps=steps, size=4, seed=3))
    assert diffcache.report(pipe).summary["bytes_held"] == 0
    assert torch.equal(run_tiny(pipe), run_tiny(diffcache.wrap(tiny_wan(), name)))
    assert diffcache.report(pipe).summary["steps"] == 12


@pytest.mark.peer_row(2)
@pytest.mark.parametrize("name", ["hold", "first_block", "taylorseer", "balanced"])
def test_wrapping_after_a_first_call(name, tiny_wan, run_tiny):
    """diffusers PR #14093: hooks put on after a first call never saw the context.

    Run, wrap, run equals wrap first; the passes are known by their names all the same.
    """
    settings = {"threshold": 0.5} if name == "first_block" else {}
    pipe = tiny_wan()
    run_tiny(pipe)
    found = run_tiny(diffcache.wrap(pipe, name, **settings))
    assert torch.equal(found, run_tiny(diffcache.wrap(tiny_wan(), name, **settings)))
    assert {row.branch for row in rows(pipe)} == {"cond", "uncond"} and reused(pipe) > 0


def run_part(pipe, strength, seed=0):
    """A video-to-video run over the last part of a schedule of 20 steps."""
    return pipe(
        video=[Image.new("RGB", (64, 64), (20 * i, 90, 200)) for i in range(5)],
        height=64,
        width=64,
        num_inference_steps=20,
        strength=strength,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
        **embeddings(),
    ).frames


@pytest.mark.peer_row(27)
@pytest.mark.parametrize("name", ["hold", "first_block", "taylorseer", "balanced"])
def test_a_strength_below_one_counts_the_steps_that_run(name):
    """unsloth PR #6864: with strength 0.3 of 20 steps 6 run, which is too few to cache.

    Warm-up and tail lie within the part that runs, and each run is as on a fresh pipeline.
    """
    settings = {"threshold": 0.5} if name == "first_block" else {}
    pipe = diffcache.wrap(video_to_video(), name, **settings)
    policy = diffcache.get_policy(name)
    for strength, steps in ((0.3, 6), (0.7, 14), (1.0, 20), (0.3, 6)):
        found = run_part(pipe, strength)
        # This pipeline opens no cache context: its passes have no names.
        names = {row.branch for row in rows(pipe)}
        decided = [row.decision for row in rows(pipe, min(names))]
        assert len(names) == 2 and len(decided) == steps
        assert (reused(pipe) > 0) == (steps >= 8)
        assert set(decided[: policy.guards.warmup_steps]) == {"compute"}
        assert not policy.guards.tail_steps or decided[-1] == "compute"
        fresh = diffcache.wrap(video_to_video(), name, **settings)
        assert torch.equal(found, run_part(fresh, strength))
    assert torch.equal(found, run_part(video_to_video(), 0.3))

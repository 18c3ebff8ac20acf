"""Image-to-video and VACE: what steers the clip keeps its effect at skipped steps."""

from __future__ import annotations

import math

import pytest
import torch
from PIL import Image
from tiny_pipelines import embeddings, image_to_video, vace
from toys import TIMES, apart, lively, reused, rows, start

import diffcache

PRESETS = ["quality", "balanced", "fast"]
POLICIES = ["hold", "easycache", "first_block", "taylorseer", "balanced"]
POLICIES += [pytest.param(name, marks=pytest.mark.slow) for name in ("quality", "fast")]


def picture(seed):
    """A picture of 64 x 64 pixels, of 8 x 8 coloured squares."""
    noise = torch.rand(8, 8, 3, generator=torch.Generator().manual_seed(seed))
    small = Image.fromarray((noise * 255).byte().numpy())
    return small.resize((64, 64), Image.Resampling.NEAREST)


def run(pipe, steps=20, seed=0, **call):
    """A clip of 5 frames at 64 x 64: latents [1, 4, 2, 8, 8]."""
    return pipe(
        height=64,
        width=64,
        num_frames=5,
        num_inference_steps=steps,
        guidance_scale=3.0,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
        **embeddings(),
        **call,
    ).frames


def run_image(pipe, image=0, **call):
    return run(pipe, image=picture(image), **call)


def run_vace(pipe, control=0, strength=1.0, **call):
    """VACE under five control frames, all of them to be painted anew."""
    frames = [picture(10 * control + i) for i in range(5)]
    mask = [Image.new("L", (64, 64), 255)] * 5
    return run(pipe, video=frames, mask=mask, conditioning_scale=strength, **call)


RUNS = {"image": (image_to_video, run_image), "vace": (vace, run_vace)}


@pytest.fixture(params=RUNS)
def make_and_run(request):
    """The maker of a pipeline and how it is run."""
    return RUNS[request.param]


@pytest.mark.peer_row(6)
@pytest.mark.parametrize("name", POLICIES)
def test_steps_are_skipped(name, make_and_run):
    """ComfyUI-CacheDiT #24: 0 % speed-up on image-to-video and VACE, and no error.

    Each policy skips or says why not; what comes out has the shape of what is computed.
    """
    make, run = make_and_run
    pipe = diffcache.wrap(make(), lively(name))
    shapes = set()
    pipe.transformer.register_forward_hook(
        lambda module, args, out: shapes.add((out[0].shape, out[0].dtype))
    )
    found = run(pipe)
    assert reused(pipe) > 0 or "nothing was skipped" in str(diffcache.report(pipe))
    assert shapes == {((1, 4, 2, 8, 8), torch.float32)} and torch.isfinite(found).all()
    assert {row.branch for row in rows(pipe)} == {"cond", "uncond"}


@pytest.mark.peer_row(13)
@pytest.mark.parametrize("name", POLICIES)
def test_exact_settings_are_exact(name, make_and_run):
    """raylight #44: 36 channels came out instead of 16, as the cache lay in the input's space."""
    make, run = make_and_run
    policy = diffcache.get_policy(name)
    pipe = diffcache.wrap(make(), policy, **policy.exact)
    assert torch.equal(run(pipe, steps=12), run(make(), steps=12))


@pytest.mark.peer_row(13)
@pytest.mark.parametrize("name", ["hold", "easycache", "first_block", "taylorseer", "balanced"])
def test_more_channels_come_in_than_go_out(name, tiny_wan):
    """36 in and 16 out in the wild, 9 and 4 here: a skipped step gives the 4."""
    module = diffcache.wrap(tiny_wan(in_channels=9).transformer, lively(name))
    x, text, shapes = start(1, 9, 2, 8, 8), torch.ones(1, 6, 16), set()
    for i, t in enumerate(TIMES):
        out = module(x * (1 - 0.02 * i), torch.tensor([t]), text, return_dict=False)[0]
        shapes.add((out.shape, out.dtype))
    assert shapes == {((1, 4, 2, 8, 8), torch.float32)} and reused(module) > 0


@pytest.mark.parametrize("name", PRESETS)
def test_control_keeps_its_effect(name):
    """Two controls make two clips: under a preset they differ as much, and in the same way."""
    plain = [run_vace(vace(), control) for control in (0, 1)]
    pipe = diffcache.wrap(vace(), name)
    found = []
    for control in (0, 1):
        found.append(run_vace(pipe, control))
        assert reused(pipe) > 0
    true, ours = plain[1] - plain[0], found[1] - found[0]
    assert true.norm() > 0.01 * plain[0].norm()  # there is an effect to keep
    assert 0.85 < float(ours.norm() / true.norm()) < 1.15
    assert torch.cosine_similarity(ours.flatten(), true.flatten(), dim=0) > 0.95


@pytest.mark.parametrize("name", PRESETS)
def test_control_grows_with_its_strength(name):
    """conditioning_scale 0, 0.5 and 1: the distance from the clip without control grows as ever."""
    strengths = (0.0, 0.5, 1.0)
    plain = [run_vace(vace(), strength=strength) for strength in strengths]
    pipe = diffcache.wrap(vace(), name)
    found = [run_vace(pipe, strength=strength) for strength in strengths]
    for clips in (plain, found):
        assert 0 < apart(clips[1], clips[0]) < apart(clips[2], clips[0])
    for i in (1, 2):
        true, ours = apart(plain[i], plain[0]), apart(found[i], found[0])
        assert 0.75 < ours / true < 1.33


@pytest.mark.parametrize("name", PRESETS)
def test_the_image_keeps_its_effect(name):
    """The same of the first frame in image-to-video."""
    plain = [run_image(image_to_video(), image) for image in (0, 1)]
    pipe = diffcache.wrap(image_to_video(), name)
    found = [run_image(pipe, image) for image in (0, 1)]
    true, ours = plain[1] - plain[0], found[1] - found[0]
    assert true.norm() > 0.01 * plain[0].norm()
    assert 0.85 < float(ours.norm() / true.norm()) < 1.15
    assert torch.cosine_similarity(ours.flatten(), true.flatten(), dim=0) > 0.95


@pytest.mark.peer_row(32)
@pytest.mark.parametrize("name", POLICIES)
def test_another_image_under_the_same_prompt(name, make_and_run):
    """vllm-omni PR #4937: reuse between requests did not look at the conditioning image.

    Same prompt, same seed, other image, also after a cancelled run: as on a fresh pipeline.
    """
    make, run = make_and_run

    def cancel(pipe, index, t, tensors):
        if index == 6:
            raise InterruptedError
        return tensors

    pipe = diffcache.wrap(make(), lively(name))
    first = run(pipe, 0, steps=12)
    with pytest.raises(InterruptedError):
        run(pipe, 0, steps=12, callback_on_step_end=cancel)
    second = run(pipe, 1, steps=12)
    assert torch.equal(second, run(diffcache.wrap(make(), lively(name)), 1, steps=12))
    assert not torch.equal(first, second)


@pytest.mark.peer_row(29)
@pytest.mark.parametrize("name", POLICIES)
def test_no_black_regions(name, make_and_run):
    """cache-dit #622: snow and black regions in image-to-video.

    A NaN in the latents at one step reaches no skipped step: from there on all is computed.
    """
    make, run = make_and_run

    def spoil(pipe, index, t, tensors):
        if index == 5:
            tensors["latents"] = tensors["latents"] * math.nan
        return tensors

    pipe = diffcache.wrap(make(), lively(name))
    run(pipe, steps=12, callback_on_step_end=spoil)
    after = [row for row in rows(pipe, "cond") if row.step > 6]
    policy = diffcache.get_policy(name)
    static = policy.metric is None
    # A table without a probe may skip before it has computed a step that shows the NaN.
    first = next((i for i, row in enumerate(after) if row.decision == "compute"), 0)
    assert {row.decision for row in (after[first:] if static else after)} == {"compute"}

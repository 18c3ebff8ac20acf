"""Guidance: passes with names and without, one or several, split or in one batch."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from tiny_pipelines import batched_guidance, embeddings, video_to_video
from toy_loop import ToyPipe
from toys import COND, SITES, TIMES, UNCOND, Bare, apart, drive, equal, far, latents, reused, rows

import diffcache

STEPS = 12


@pytest.mark.peer_row(1)
@pytest.mark.parametrize("site", SITES)
def test_no_cooperation_of_the_pipeline_is_needed(site):
    """diffusers #12012: a pipeline that opens no cache context made the cache raise.

    Two passes that nobody names: two branches, each with its own steps; exact is exact.
    """
    passes = lambda step: [{"cond": COND}, {"cond": UNCOND}]  # noqa: E731
    module = diffcache.wrap(Bare(), "hold", site=site)
    found = drive(module, passes)
    names = {row.branch for row in rows(module)}
    assert len(names) == 2 and reused(module) > 0
    for name in names:
        steps = [row.step for row in rows(module) if row.branch == name]
        assert sorted(set(steps)) == list(range(12))
    assert equal(drive(module, passes), found)
    exact = diffcache.wrap(Bare(), "hold", site=site, fraction=1.0)
    assert equal(drive(exact, passes), drive(Bare(), passes))


@pytest.mark.peer_row(1)
def test_branches_are_known_by_name_not_by_counting(tiny_wan, run_tiny):
    """Without guidance 12 steps are 12; switched off in mid-run the rest stays conditional."""
    pipe = diffcache.wrap(tiny_wan(), "hold")
    run_tiny(pipe, guidance=1.0)
    assert [row.step for row in diffcache.report(pipe).rows] == list(range(STEPS))
    assert {row.branch for row in diffcache.report(pipe).rows} == {"cond"}

    def switch_off(pipe, index, t, tensors):
        pipe._guidance_scale = 1.0 if index >= 5 else 5.0
        return tensors

    run_tiny(pipe, callback_on_step_end=switch_off)
    assert [row.step for row in rows(pipe, "cond")] == list(range(STEPS))
    assert [row.step for row in rows(pipe, "uncond")] == list(range(6))


@pytest.mark.peer_row(1)
def test_branches_without_names_are_told_by_their_conditioning():
    """A loop that names nothing: either order of the passes, guidance off in mid-run."""
    module = diffcache.wrap(Conditioned(), "hold")
    x = torch.randn(1, 4, generator=torch.Generator().manual_seed(0))
    cond, uncond = torch.full((1, 4), 1.0), torch.full((1, 4), -1.0)
    found = {"cond": [], "uncond": []}
    for i in range(STEPS):
        passes = [("cond", cond)] if i > 7 else [("cond", cond), ("uncond", uncond)]
        for name, text in passes if i % 2 else reversed(passes):
            module(x, 1000.0 - 40 * i, text)
            found[name].append(diffcache.report(module).rows[-1])
    names = {name: {row.branch for row in rows} for name, rows in found.items()}
    assert len(names["cond"]) == len(names["uncond"]) == 1 and names["cond"] != names["uncond"]
    assert [row.step for row in found["cond"]] == list(range(STEPS))


class Conditioned(torch.nn.Module):
    """x + t + text: reused outputs of a wrong branch would be off by 2."""

    def forward(self, x, t, text):
        return x + t / 1000 + text


@pytest.mark.peer_row(34)
@pytest.mark.parametrize("site", SITES)
def test_guidance_branches_do_not_mix(site, tiny_wan, run_tiny):
    """At no site does one branch get the other one's output; the clip stays near the plain one."""
    pipe = diffcache.wrap(tiny_wan(), "hold", site=site)
    seen = {"cond": [], "uncond": []}

    def look(module, args, output):
        row = diffcache.report(pipe).rows[-1]
        seen[row.branch].append(output[0].clone())

    pipe.transformer.register_forward_hook(look)
    out, plain = run_tiny(pipe), run_tiny(tiny_wan())
    assert reused(pipe) > 0
    truth = {"cond": [], "uncond": []}
    one = tiny_wan()
    order = iter(["cond", "uncond"] * STEPS)
    one.transformer.register_forward_hook(
        lambda module, args, output: truth[next(order)].append(output[0])
    )
    run_tiny(one)
    for branch, other in (("cond", "uncond"), ("uncond", "cond")):
        for step in range(STEPS):
            near = (seen[branch][step] - truth[branch][step]).abs().mean()
            far = (seen[branch][step] - truth[other][step]).abs().mean()
            assert near < far, (branch, step)
    assert (out - plain).abs().mean() / plain.abs().mean() < 0.2


@pytest.mark.peer_row(12)
@pytest.mark.parametrize("site", SITES)
def test_batched_and_split_guidance_in_one_run(site):
    """ComfyUI-TeaCache #158: [1, ...] += [2, ...] crashed when batched guidance was split.

    Both passes in one call, in two, in one again: shapes are right and nothing is mixed.
    """

    def passes(step):
        both = {"cond": torch.cat([COND, UNCOND])}
        return [both] if step % 6 < 3 else [{"cond": COND}, {"cond": UNCOND}]

    def run(module):
        x, outputs = latents(), []
        for step, t in enumerate(TIMES):
            calls = passes(step)
            given = torch.cat([x, x]) if len(calls) == 1 else x
            found = torch.cat([module(given, t, **call) for call in calls])
            assert found.shape == (2, 5, 6)
            outputs.append(found)
            x = x - found[:1] / 12
        return outputs

    module = diffcache.wrap(Bare(), "hold", site=site, min_steps=0, warmup_steps=1)
    for found, true in zip(run(module), run(Bare()), strict=True):
        assert (found - true).abs().max() < (true[0] - true[1]).abs().max()


@pytest.mark.peer_row(34)
@pytest.mark.parametrize("site", SITES)
def test_guidance_with_three_passes(site):
    """ParaAttention with guiders (diffusers PR #11180): counting by twos mixes up three passes.

    Perturbed attention (a pass that skips layers) has its own state beside cond and uncond.
    """

    def passes(step):
        return [{"cond": COND}, {"cond": UNCOND}, {"cond": COND, "skip_layers": [1, 2]}]

    def run(module):
        x = latents()
        return [
            [module(x * (1 - 0.02 * i), t, **call) for call in passes(i)]
            for i, t in enumerate(TIMES)
        ]

    module = diffcache.wrap(Bare(), "hold", site=site)
    found, true = run(module), run(Bare())
    assert len({row.branch for row in rows(module)}) == 3 and reused(module) > 0
    for ours, theirs in zip(found, true, strict=True):
        for i in range(3):
            near = (ours[i] - theirs[i]).abs().mean()
            assert all(near < (ours[i] - theirs[j]).abs().mean() for j in range(3) if j != i)


@pytest.mark.peer_row(34)
@pytest.mark.parametrize("third", ["perturbed", "skip_layers", "momentum"])
def test_named_passes(third, tiny_wan):
    """The same for PAG, SLG and APG passes that have a name: as many branches as names."""
    module = diffcache.wrap(tiny_wan().transformer, "hold")
    x, text = torch.randn(1, 4, 2, 8, 8), torch.ones(1, 6, 16)
    for t in TIMES:
        for name in ("cond", "uncond", third):
            with module.cache_context(name):
                module(x, torch.tensor([t]), text, return_dict=False)
    for name in ("cond", "uncond", third):
        assert [row.step for row in rows(module) if row.branch == name] == list(range(12))


def run_ltx(pipe, guidance=3.0, **call):
    """An LTXPipeline from seeded noise: both passes in one batch while guidance is on."""
    masks = {"prompt_attention_mask": torch.ones(1, 6)}
    masks["negative_prompt_attention_mask"] = torch.ones(1, 6)
    return pipe(
        height=64,
        width=64,
        num_frames=9,
        num_inference_steps=12,
        guidance_scale=guidance,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
        **embeddings(),
        **masks,
        **call,
    ).frames


def guidance_off(pipe, index, t, tensors):
    """What diffusers' documentation shows: from step 5 on the conditional half alone."""
    if index == 4:
        pipe._guidance_scale = 1.0
        tensors["prompt_embeds"] = tensors["prompt_embeds"].chunk(2)[-1]
    return tensors


def halve_the_mask(pipe):
    """LTX keeps the mask of both halves after the callback: the model gets what fits."""
    inner = pipe.transformer.forward

    def forward(*args, encoder_attention_mask=None, **kwargs):
        mask = encoder_attention_mask[-kwargs["hidden_states"].shape[0] :]
        return inner(*args, encoder_attention_mask=mask, **kwargs)

    pipe.transformer.forward = forward


@pytest.mark.peer_row(12)
@pytest.mark.parametrize("site", SITES)
def test_both_passes_in_one_batch(site):
    """Batch-concatenated guidance: one branch, near the plain clip; exact is exact."""
    plain = run_ltx(batched_guidance())
    pipe = diffcache.wrap(batched_guidance(), "hold", site=site)
    found = run_ltx(pipe)
    assert {row.branch for row in rows(pipe)} == {"cond_uncond"} and reused(pipe) > 0
    assert 0 < apart(found, plain) < 0.2
    assert torch.equal(run_ltx(pipe), found)
    diffcache.wrap(pipe, "hold", site=site, fraction=1.0)
    assert torch.equal(run_ltx(pipe), plain)


@pytest.mark.peer_row(12)
@pytest.mark.parametrize("site", SITES)
def test_batched_guidance_switched_off_in_mid_run(site):
    """The batch falls from 2 to 1 at step 5: that step is computed, and the rest goes on."""
    call = {
        "callback_on_step_end": guidance_off,
        "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"],
    }
    pipe, plain = batched_guidance(), batched_guidance()
    for one in (pipe, plain):
        halve_the_mask(one)
    expected = run_ltx(plain, **call)
    diffcache.wrap(pipe, "hold", site=site, min_steps=0)
    found = run_ltx(pipe, **call)
    one_row_per_call = [row for row in rows(pipe) if row.seconds]
    assert len(one_row_per_call) == 12 and one_row_per_call[5].decision == "compute"
    assert any(row.decision == "reuse" for row in one_row_per_call[6:])
    assert 0 < apart(found, expected) < 0.2
    assert torch.equal(run_ltx(pipe, **call), found)
    diffcache.wrap(pipe, "hold", site=site, fraction=1.0)
    assert torch.equal(run_ltx(pipe, **call), expected)


@pytest.mark.peer_row(12)
def test_guidance_on_and_off_from_request_to_request():
    """Batches of 2 and of 1 take turns: each as on a fresh pipeline."""
    pipe = diffcache.wrap(batched_guidance(), "hold")
    for guidance in (3.0, 1.0, 3.0):
        expected = run_ltx(diffcache.wrap(batched_guidance(), "hold"), guidance)
        assert torch.equal(run_ltx(pipe, guidance), expected) and reused(pipe) > 0


class Perturbed(Bare):
    """Its second pass of a step is another one by what is in the model, as with swapped attention
    processors: no argument tells."""

    perturb = False

    def forward(self, x, t, cond):
        out = super().forward(x, t, cond)
        return out + 1 if self.perturb else out


def perturbed_loop(module, scheduler=None, steps=12):
    """Each step plain and perturbed; the outputs of both."""
    x, found = latents(), []
    levels = torch.linspace(1, 0, steps + 1)
    if scheduler is not None:
        scheduler.sigmas, scheduler.timesteps = levels, levels[:-1] * 1000
    for t in levels[:-1] * 1000:
        for module.perturb in (False, True):
            found.append(module(x, t, COND))
        x = x - found[-2] / steps
    return found


@pytest.mark.peer_row(1)
@pytest.mark.parametrize("site", SITES)
def test_passes_that_cannot_be_told_apart(site):
    """Prompt and negative prompt are equal and nobody names them: all is computed, and said once.

    Without a scheduler the first such step may be a run that was cancelled and one begun anew.
    """

    def passes(step):
        return [{"cond": COND}, {"cond": COND.clone()}]

    module, plain = diffcache.wrap(Bare(), "hold", site=site), drive(Bare(), passes)
    found = drive(module, passes)
    assert len({row.branch for row in rows(module)}) == 1
    assert equal(found[2:], plain[2:]) and far(found[1], plain[1]) < 0.2
    assert {row.reason for row in rows(module)[-10:]} == {"ambiguous branch"}
    notes = diffcache.report(module).summary["notes"]
    assert sum("two passes of one step have the same name" in note for note in notes) == 1
    assert equal(drive(module, passes), found)
    diffcache.wrap(module, "hold", site=site, fraction=1.0)
    assert equal(drive(module, passes), plain)


@pytest.mark.peer_row(1)
@pytest.mark.parametrize("name", ["hold", "easycache", "taylorseer", "balanced", "fast"])
def test_a_pass_that_differs_by_the_model_alone_is_never_taken_for_the_other(name):
    """Perturbed attention by swapped processors: with a scheduler, exact from the first step on."""
    toy = ToyPipe()
    toy.transformer = Perturbed()
    pipe = diffcache.wrap(toy, name)
    for _ in range(2):
        found = perturbed_loop(pipe.transformer, pipe.scheduler)
        assert equal(found, perturbed_loop(Perturbed()))
        # The first call cannot know of the second.
        assert [row.reason == "ambiguous branch" for row in rows(pipe)] == [False] + [True] * 23
    assert "two passes of one step" in str(diffcache.report(pipe))


def test_a_step_made_again_costs_two_computed_steps():
    """A loop that goes back over one step is cached again after it."""
    toy = ToyPipe()
    toy.transformer = Bare()
    pipe = diffcache.wrap(toy, "hold", fraction=0.5)
    levels = torch.linspace(1, 0, 25)
    pipe.scheduler.sigmas, pipe.scheduler.timesteps = levels, levels[:-1] * 1000
    for step, t in enumerate(levels[:-1] * 1000):
        for _ in range(1 + (step == 6)):
            pipe.transformer(latents(seed=step), t, COND)
    reasons = [row.reason for row in rows(pipe)]
    assert reasons.count("ambiguous branch") == 2 and reasons[7:9] == ["ambiguous branch"] * 2
    assert any(row.decision == "reuse" for row in rows(pipe)[9:])


@pytest.mark.peer_row(1)
@pytest.mark.parametrize("name", ["hold", "taylorseer", "balanced"])
def test_equal_prompts_in_a_pipeline_that_names_nothing(name):
    """The same in a stock pipeline without cache contexts: in doubt all is computed, and said."""
    same = embeddings()["prompt_embeds"]

    def run(pipe):
        return pipe(
            video=[Image.new("RGB", (64, 64), (40 * i, 90, 200)) for i in range(5)],
            height=64,
            width=64,
            num_inference_steps=12,
            strength=1.0,
            guidance_scale=3.0,
            prompt_embeds=same,
            negative_prompt_embeds=same.clone(),
            generator=torch.Generator().manual_seed(0),
            output_type="latent",
        ).frames

    plain, pipe = run(video_to_video()), diffcache.wrap(video_to_video(), name)
    found = run(pipe)
    assert torch.equal(found, plain)
    assert "nothing was skipped; most often because: ambiguous" in str(diffcache.report(pipe))

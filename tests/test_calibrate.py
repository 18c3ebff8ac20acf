"""Calibration: recording full runs, and a table fitted to a pipeline."""

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from tiny_pipelines import embeddings, two_experts
from toy_loop import ToyPipe
from toys import COND, UNCOND, Bare, latents

import diffcache
from diffcache.calibrate import calibrate, decibel, pixels, record


def test_the_record_is_the_gram_matrix_of_what_the_scheduler_was_handed(tiny_wan, run_tiny) -> None:
    pipe = tiny_wan()
    handed = []
    step = pipe.scheduler.step
    pipe.scheduler.step = lambda output, *a, **k: handed.append(output) or step(output, *a, **k)
    run_tiny(pipe, steps=9)
    del pipe.scheduler.step
    (runs,) = record(pipe, [lambda: run_tiny(pipe, steps=9)]).values()
    rows = torch.stack(handed).flatten(1).double()
    products = rows @ rows.T
    assert runs.sigmas == tuple(pipe.scheduler.sigmas.tolist())
    torch.testing.assert_close(
        torch.from_numpy(runs.grams[0]), products / products.diagonal().mean(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("second", [None, 1.5])
def test_each_expert_and_step_is_recorded_with_its_own_guidance(second) -> None:
    """Wan 2.2's second expert may have another scale, and a callback may switch guidance off."""

    def off(pipe, index, t, tensors):
        if index == 17:
            pipe._guidance_scale = 1.0
        return tensors

    def run():
        return pipe(
            height=64,
            width=64,
            num_frames=5,
            num_inference_steps=20,
            guidance_scale=3.0,
            guidance_scale_2=second,
            output_type="latent",
            generator=torch.Generator().manual_seed(0),
            callback_on_step_end=off,
            **embeddings(),
        ).frames

    pipe, handed = two_experts(), []
    step = pipe.scheduler.step
    pipe.scheduler.step = lambda output, *a, **k: handed.append(output) or step(output, *a, **k)
    run()
    del pipe.scheduler.step
    found = record(pipe, [run])
    first = len(found["transformer"].sigmas) - 1
    rows = torch.stack(handed).flatten(1).double()
    for name, own in (("transformer", rows[:first]), ("transformer_2", rows[first:])):
        products = own @ own.T
        torch.testing.assert_close(
            torch.from_numpy(found[name].grams[0]),
            products / products.diagonal().mean(),
            rtol=1e-4,
            atol=1e-5,
        )


def test_unnamed_passes_that_change_in_mid_run_are_refused() -> None:
    pipe, levels = ToyPipe(), torch.linspace(1, 0, 11)
    pipe.transformer = Bare()

    def run():
        pipe.scheduler.sigmas, pipe.scheduler.timesteps = levels, levels[:-1] * 1000
        for step, t in enumerate(levels[:-1] * 1000):
            for text in (COND, UNCOND)[: 1 + (step < 6)]:
                pipe.transformer(latents(), t, text)

    with torch.no_grad(), pytest.raises(ValueError, match="guidance that stays on"):
        record(pipe, [run])


def test_batch_items_and_runs_are_clips(tiny_wan, run_tiny) -> None:
    pipe = tiny_wan()
    runs = record(
        pipe, [lambda: run_tiny(pipe, steps=8, batch=2), lambda: run_tiny(pipe, steps=8, seed=5)]
    )
    assert runs["transformer"].grams.shape == (3, 8, 8)


def test_recording_leaves_the_pipeline_as_it_was(tiny_wan, run_tiny) -> None:
    pipe, twin = tiny_wan(), tiny_wan()
    run_tiny(twin, steps=8)
    record(pipe, [lambda: run_tiny(pipe, steps=8)])
    assert set(pipe.__dict__) == set(twin.__dict__)
    assert set(pipe.transformer.__dict__) == set(twin.transformer.__dict__)
    diffcache.wrap(pipe, "hold", fraction=0.5)
    record(pipe, [lambda: run_tiny(pipe, steps=8)])
    run_tiny(pipe, steps=8)
    assert diffcache.report(pipe).summary["policy"] == "hold"


def test_calibration_gives_a_policy_file_with_its_own_table(tiny_wan, run_tiny, tmp_path) -> None:
    pipe = tiny_wan()
    policy = calibrate(
        pipe, [lambda: run_tiny(pipe, steps=16)], fraction=0.5, error_weights=(0.0,), worst=(2.0,)
    )
    policy.save(tmp_path / "own.json")
    diffcache.wrap(pipe, tmp_path / "own.json")
    run_tiny(pipe, steps=16)
    assert diffcache.report(pipe).summary["computed"] == {"cond": 8, "uncond": 8}
    sigmas = pipe.scheduler.sigmas.tolist()
    computed = {row.step for row in diffcache.report(pipe).rows if row.decision == "compute"}
    assert {sigmas[step] for step in computed} == set(policy.settings()["sigmas"])


def test_a_fitted_table_is_at_least_as_good_as_each_that_was_tried(tiny_wan, run_tiny) -> None:
    pipe = tiny_wan()
    truth = run_tiny(pipe, steps=16)

    def reached(policy) -> float:
        diffcache.wrap(pipe, policy)
        found = decibel(run_tiny(pipe, steps=16), truth)
        diffcache.unwrap(pipe)
        return float(found.min())

    runs = [lambda: run_tiny(pipe, steps=16)]
    one = {"fraction": 0.4, "worst": (2.0,)}
    parts = [calibrate(pipe, runs, error_weights=(w,), **one) for w in (-1.0, 1.0)]
    both = calibrate(pipe, runs, error_weights=(-1.0, 1.0), **one)
    assert reached(both) == pytest.approx(max(map(reached, parts)), abs=1e-3)


def test_a_scheduler_without_noise_levels_is_refused(tiny_wan, run_tiny) -> None:
    pipe = tiny_wan()
    pipe.scheduler = DPMSolverMultistepScheduler()
    with pytest.raises(ValueError, match="needs a pipeline with a flow-matching scheduler"):
        record(pipe, [lambda: run_tiny(pipe, steps=8)])


def test_runs_of_different_schedules_are_refused(tiny_wan, run_tiny) -> None:
    pipe = tiny_wan()
    with pytest.raises(ValueError, match="different schedules"):
        record(pipe, [lambda: run_tiny(pipe, steps=8), lambda: run_tiny(pipe, steps=9)])


def test_no_runs_are_refused(tiny_wan) -> None:
    with pytest.raises(ValueError, match="at least one run"):
        record(tiny_wan(), [])


def test_a_policy_without_a_table_over_sigma_is_refused(tiny_wan, run_tiny) -> None:
    pipe = tiny_wan()
    with pytest.raises(ValueError, match="'easycache' has 'accumulate'"):
        calibrate(pipe, [lambda: run_tiny(pipe)], policy="easycache")


def test_a_run_that_does_not_repeat_itself_is_refused(tiny_wan, run_tiny) -> None:
    pipe, seeds = tiny_wan(), iter(range(100))
    with pytest.raises(ValueError, match="does not repeat itself"):
        calibrate(pipe, [lambda: run_tiny(pipe, steps=16, seed=next(seeds))], fraction=0.5)


def test_what_a_pipeline_returned_becomes_one_tensor() -> None:
    from diffusers.pipelines.wan.pipeline_output import WanPipelineOutput
    from PIL import Image

    frames = torch.rand(2, 3, 4, 4)
    assert pixels(WanPipelineOutput(frames=frames)) is frames or torch.equal(
        pixels(WanPipelineOutput(frames=frames)), frames
    )
    picture = Image.new("RGB", (4, 3), (255, 0, 0))
    assert pixels([picture, picture]).shape == (2, 3, 4, 3)
    with pytest.raises(ValueError, match="returned nothing"):
        pixels([])


def test_decibel_is_the_psnr_with_the_range_of_the_truth() -> None:
    truth = torch.tensor([[0.0, 2.0]])
    assert decibel(truth + 0.2, truth).item() == pytest.approx(20.0)  # 10 log10(4 / 0.04)

"""Trajectories: where a new one begins, and what is counted within it."""

from __future__ import annotations

import copy
import random

import diffusers
import pytest
import torch

from diffcache.context import Clock
from diffcache.signature import Call

TEXT = torch.ones(1, 3, 4)
OTHER = torch.zeros(1, 3, 4)


class Pipe:
    """What the clock reads of a pipeline."""

    def __init__(self, scheduler):
        self.scheduler = scheduler


def unipc():
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.0
    )


SCHEDULERS = {
    "unipc_flow": unipc,
    "euler_flow": diffusers.FlowMatchEulerDiscreteScheduler,
    "ddim": diffusers.DDIMScheduler,
    "euler": diffusers.EulerDiscreteScheduler,
    "dpm": diffusers.DPMSolverMultistepScheduler,
}


def watched(scheduler):
    """A clock on a pipeline with this scheduler."""
    pipe, clock = Pipe(scheduler), Clock()
    clock.watch(pipe)
    return clock, pipe


def call(timestep, text=TEXT, shape=(1, 2, 4), dtype=torch.float32, **options):
    """A bound call of a denoiser."""
    conditioning = (("encoder_hidden_states", text),)
    return Call((torch.zeros(shape, dtype=dtype),), timestep, conditioning, tuple(options.items()))


def walk(clock, timesteps, **fields):
    """The contexts of one branch over a list of timesteps."""
    return [clock.begin(call(float(t), **fields)) for t in timesteps]


def armed(pipe, steps):
    pipe.scheduler.set_timesteps(steps)
    return pipe.scheduler.timesteps


def assert_one_run(contexts, steps):
    """New at the first call alone; steps counted 0 .. n - 1 of n."""
    assert contexts[0].new is not None
    assert [c.new for c in contexts[1:]] == [None] * (len(contexts) - 1)
    assert [c.step for c in contexts] == list(range(steps))
    assert {c.num_steps for c in contexts} == {steps}


@pytest.mark.parametrize("steps", [1, 2, 12, 50])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_runs_are_told_apart_by_arming(name, steps):
    """Every run after set_timesteps is one trajectory of the right length, equal t or not."""
    clock, pipe = watched(SCHEDULERS[name]())
    for count in (steps, steps, steps + 3):
        contexts = walk(clock, armed(pipe, count))
        assert_one_run(contexts, count)
    assert contexts[0].new == "scheduler armed anew"


@pytest.mark.parametrize("name", SCHEDULERS)
def test_time_and_sigma(name):
    """Flow matching is timed by sigma, with the move to the next; all else by the timestep."""
    clock, pipe = watched(SCHEDULERS[name]())
    contexts = walk(clock, armed(pipe, 8))
    sigmas = getattr(pipe.scheduler, "sigmas", None)
    times = pipe.scheduler.timesteps.tolist()
    if sigmas is not None:
        assert [c.sigma for c in contexts] == pytest.approx(sigmas[:8].tolist())
    expected = sigmas[:8].tolist() if name.endswith("flow") else times
    assert [c.time for c in contexts] == pytest.approx(expected)
    flow = name.endswith("flow")
    moves = (sigmas[1:] - sigmas[:-1]).tolist() if flow else [None] * 8
    assert [c.width for c in contexts] == (pytest.approx(moves) if flow else moves)


def test_last_timestep_is_noticed():
    """`last_served` is true at the last call of each branch and never before."""
    clock, pipe = watched(unipc())
    served = []
    for timestep in armed(pipe, 6):
        for text in (TEXT, OTHER):
            served.append(clock.last_served(clock.begin(call(float(timestep), text))))
    assert served == [False] * 10 + [True] * 2


def test_equal_values_in_a_new_tensor_are_a_new_run():
    """Identity of `timesteps` counts, not its content; the same tensor goes on."""
    clock, pipe = watched(unipc())
    first, second, *_ = armed(pipe, 6).tolist()
    assert walk(clock, [first, second])[1].new is None
    armed(pipe, 6)
    assert clock.begin(call(first)).new == "scheduler armed anew"


def test_armed_before_wrap_is_not_trusted():
    """A schedule left over from before says nothing; the next arming does."""
    scheduler = unipc()
    scheduler.set_timesteps(5)
    clock, pipe = watched(scheduler)
    assert {c.num_steps for c in walk(clock, [999.0, 900.0, 800.0])} == {None}
    assert_one_run(walk(clock, armed(pipe, 7)), 7)


def test_deepcopied_scheduler():
    """Pipelines that step a copy (LTX-2, SkyReels): the armed original is what counts."""
    clock, pipe = watched(unipc())
    for _ in range(2):
        timesteps = armed(pipe, 8)
        copies = [copy.deepcopy(pipe.scheduler) for _ in range(3)]
        assert_one_run(walk(clock, timesteps), 8)
        assert all(c.timesteps is not pipe.scheduler.timesteps for c in copies)


def test_only_a_copy_is_armed():
    """Where the original is never armed, the direction of t still tells runs apart."""
    clock, pipe = watched(unipc())
    for _ in range(2):
        other = copy.deepcopy(pipe.scheduler)
        other.set_timesteps(8)
        contexts = walk(clock, other.timesteps)
        assert contexts[0].new is not None and all(c.new is None for c in contexts[1:])
        assert [c.step for c in contexts] == list(range(8))


@pytest.mark.parametrize("start", [1, 8, 19])
def test_sliced_timesteps(start):
    """Image-to-image begins within the schedule: fewer steps, counted from its own first."""
    clock, pipe = watched(unipc())
    for _ in range(2):
        contexts = walk(clock, armed(pipe, 20)[start:])
        assert_one_run(contexts, 20 - start)
        assert clock.last_served(contexts[-1])


def test_heun_visits_twice():
    """FlowMatchHeun: 2n - 1 calls, n steps, one trajectory, the last call is the last one."""
    clock, pipe = watched(diffusers.FlowMatchHeunDiscreteScheduler())
    for _ in range(2):
        contexts, served = [], []
        for timestep in armed(pipe, 5):
            contexts.append(clock.begin(call(float(timestep))))
            served.append(clock.last_served(contexts[-1]))
        assert [c.step for c in contexts] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert contexts[0].new and not any(c.new for c in contexts[1:])
        assert {c.num_steps for c in contexts} == {5}
        assert served == [False] * 8 + [True]


def test_heun_without_a_schedule():
    """The same for a bare module: twice is the solver's order, three times is a new run."""
    clock = Clock()
    contexts = walk(clock, [1000, 667, 667, 334, 334, 1, 1])
    assert [c.step for c in contexts] == [0, 1, 1, 2, 2, 3, 3]
    assert contexts[0].new and not any(c.new for c in contexts[1:])
    assert clock.begin(call(1.0)).new == "timestep came back"


@pytest.mark.parametrize("times", [(900.0, 600.0, 300.0), (0.0, 0.3, 0.6), (0.9, 0.5, 0.1)])
def test_bare_module_in_either_direction(times):
    """Some models count up; a move against the trajectory's own direction begins another."""
    clock = Clock()
    for _ in range(3):
        contexts = walk(clock, times)
        assert [bool(c.new) for c in contexts] == [True, False, False]
        assert [c.step for c in contexts] == [0, 1, 2]


def test_bare_one_step_runs_with_equal_t():
    """Without a scheduler the first timestep seen again is a new run."""
    clock = Clock()
    assert all(c.new for c in walk(clock, [500.0] * 4))


@pytest.mark.parametrize("done", [1, 2, 5])
def test_bare_module_after_a_cancelled_run(done):
    """A run begun again from the start is noticed wherever the last one broke off."""
    clock, times = Clock(), [999.0 - 90 * i for i in range(10)]
    walk(clock, times[:done])
    contexts = walk(clock, times)
    assert contexts[0].new and not any(c.new for c in contexts[1:])


@pytest.mark.parametrize("done", [1, 5, 11])
def test_cancelled_run(done):
    """With a scheduler arming tells, wherever the last run broke off."""
    clock, pipe = watched(unipc())
    walk(clock, armed(pipe, 12)[:done])
    assert_one_run(walk(clock, armed(pipe, 12)), 12)


@pytest.mark.parametrize("steps", [12, 50, 200])
@pytest.mark.parametrize("done", [1, 2, 5])
def test_begun_again_without_arming(steps, done):
    """A loop broken off and begun again on the same timesteps: its first call is a new run."""
    clock, pipe = watched(unipc())
    timesteps = armed(pipe, steps)
    walk(clock, timesteps[:done])
    assert_one_run(walk(clock, timesteps), steps)


def scaled(timesteps, form):
    """What some models are given in place of the scheduler's timesteps."""
    forms = {
        "flux": timesteps / 1000,
        "lumina": 1 - timesteps / 1000,
        "bf16": timesteps.bfloat16(),
        "whole": timesteps.long(),  # Helios in stages cuts fractions off
        "flux_bf16": timesteps.bfloat16() / 1000,
    }
    return forms[form].tolist()


@pytest.mark.parametrize("form", ["flux", "lumina", "bf16", "flux_bf16", "whole"])
@pytest.mark.parametrize("steps", [8, 10, 20, 30, 50, 100])
@pytest.mark.parametrize("shift", [1.0, 3.0, 7.0])
def test_scaled_timesteps(form, steps, shift):
    """t / 1000, 1 - t / 1000 and t rounded to bf16 (several steps may then have equal t)."""
    clock, pipe = watched(diffusers.FlowMatchEulerDiscreteScheduler(shift=shift))
    for _ in range(2):
        timesteps = armed(pipe, steps)
        contexts = walk(clock, scaled(timesteps, form))
        if form == "bf16" and (steps, shift) == (100, 7.0):
            # 999 and 998.6 both become 1000, as if the loop had begun again: in doubt, a new run.
            assert contexts[1].new == "timestep came back"
            return
        assert_one_run(contexts, steps)
        assert [c.sigma for c in contexts] == pytest.approx(pipe.scheduler.sigmas[:-1].tolist())
        assert clock.last_served(contexts[-1])


@pytest.mark.parametrize("counts", [(10, 20), (20, 10), (50, 10), (12, 12), (10, 11)])
def test_two_pipelines_share_a_denoiser(counts):
    """Each run follows the schedule of the pipeline that was armed for it, in any order."""
    clock, one = watched(unipc())
    two = Pipe(unipc())
    clock.watch(two)
    for pipe, steps in [(one, counts[0]), (two, counts[1]), (one, counts[0]), (one, counts[1])]:
        assert_one_run(walk(clock, armed(pipe, steps)), steps)


def test_deleted_pipeline():
    """A pipeline is held weakly; when it is gone the rules without a scheduler apply."""
    clock, pipe = watched(unipc())
    timesteps = armed(pipe, 6).tolist()
    walk(clock, timesteps)
    del pipe
    contexts = walk(clock, timesteps)
    assert contexts[0].new and {c.num_steps for c in contexts} == {None}


@pytest.mark.parametrize(
    "change", [{"shape": (2, 2, 4)}, {"shape": (1, 2, 5)}, {"dtype": torch.bfloat16}]
)
def test_changed_latents_begin_anew(change):
    """Size, batch and dtype do not change within a trajectory."""
    clock, pipe = watched(unipc())
    first, second, third, *_ = armed(pipe, 9).tolist()
    walk(clock, [first, second])
    assert clock.begin(call(third, **change)).new == "shape, dtype or device changed"


def test_chunks():
    """Each chunk is a trajectory of its own under one arming."""
    clock, pipe = watched(unipc())
    timesteps = armed(pipe, 8)
    for index in range(3):
        clock.chunk = index
        contexts = walk(clock, timesteps)
        assert_one_run(contexts, 8)
        assert {c.chunk for c in contexts} == {index}


@pytest.mark.parametrize("bare", [False, True])
def test_chunks_in_turn(bare):
    """Diffusion forcing: chunks advance in turn; each change of chunk begins anew, whatever t."""
    clock, pipe = watched(unipc())
    timesteps = armed(pipe, 9).tolist()
    clock = Clock() if bare else clock
    for index, timestep in enumerate(timesteps):
        clock.chunk = index // 3
        expected = {0: "first call"}.get(index, "new chunk" if index % 3 == 0 else None)
        assert clock.begin(call(timestep)).new == expected


def test_unknown_time_breaks_the_trajectory():
    """A call without one time has no context, and what comes after does not go on from before."""
    clock, pipe = watched(unipc())
    first, second, third, *_ = armed(pipe, 9).tolist()
    walk(clock, [first])
    assert clock.begin(call(None)) is None
    assert clock.begin(call(second)).new is not None
    assert clock.begin(call(third)).new is None


def test_reset():
    """After reset the next call is the first."""
    clock, pipe = watched(unipc())
    first, second, *_ = armed(pipe, 9).tolist()
    walk(clock, [first])
    clock.reset()
    assert clock.begin(call(second)).new == "first call"


def test_pipeline_words_without_a_scheduler():
    """sigma and the number of steps may come with cache_context."""
    clock = Clock()
    clock.named = ("cond", {"sigma": 0.7, "num_inference_steps": 9})
    context = clock.begin(call(700.0))
    assert (context.branch, context.sigma, context.time, context.num_steps) == ("cond", 0.7, 0.7, 9)


@pytest.mark.parametrize("seed", range(15))
def test_random_runs(seed):
    """Step counts, cancellations, guidance, sizes at random: new exactly where a run begins."""
    rng = random.Random(seed)
    clock, pipe = watched(rng.choice(list(SCHEDULERS.values()))())
    for _ in range(8):
        steps, shape = rng.choice([1, 2, 7, 20]), (rng.choice([1, 2]), 2, rng.choice([4, 6]))
        until, switch = rng.randrange(1, steps + 1), rng.randrange(steps + 1)
        guided, named = rng.random() < 0.5, rng.random() < 0.5
        contexts = []
        for i, timestep in enumerate(armed(pipe, steps)[:until].tolist()):
            both = guided != (i >= switch)
            for name, text in [("cond", TEXT), ("uncond", OTHER)][: 2 if both else 1]:
                clock.named = (name, {}) if named else None
                contexts.append(clock.begin(call(timestep, text, shape)))
                assert contexts[-1].step == i and contexts[-1].num_steps == steps
        assert contexts[0].new and not any(c.new for c in contexts[1:])

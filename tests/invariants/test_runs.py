"""Runs follow each other in any order and at any size, and none is announced."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import diffcache

pytestmark = pytest.mark.filterwarnings("ignore::diffcache.DiffcacheWarning")


@pytest.fixture
def fresh(policy, tiny_wan, run):
    """What a run gives on a pipeline that was just wrapped."""

    def outputs(**call):
        return run(diffcache.wrap(tiny_wan(), policy), **call)

    return outputs


def stop_at(step, how):
    """A callback that ends the run after this step, by an exception or as a user does."""

    def callback(pipe, index, t, tensors):
        if index == step and how == "raise":
            raise InterruptedError
        if index == step:
            pipe._interrupt = True
        return tensors

    return callback


def test_second_run_equals_the_first(policy, tiny_wan, run, decisions):
    """Outputs and decisions of three runs in a row."""
    pipe = diffcache.wrap(tiny_wan(), policy)
    first, rows = run(pipe), decisions(pipe)
    for _ in range(2):
        assert torch.equal(run(pipe), first) and decisions(pipe) == rows


@pytest.mark.peer_row(2)
def test_run_enable_run_equals_enable_first(policy, tiny_wan, run, fresh):
    """Wrapping after a run in plain."""
    pipe = tiny_wan()
    run(pipe)
    assert torch.equal(run(diffcache.wrap(pipe, policy)), fresh())


@pytest.mark.peer_row(10)
@pytest.mark.parametrize("how", ["raise", "interrupt"])
def test_run_after_a_cancelled_run(policy, tiny_wan, run, fresh, decisions, how):
    """Cancelled after steps 0, 4 and 7, then the same run, then one of another size."""
    pipe = diffcache.wrap(tiny_wan(), policy)
    expected = fresh()
    rows = None
    for step in (0, 4, 7):
        with pytest.raises(InterruptedError) if how == "raise" else nullcontext():
            run(pipe, callback_on_step_end=stop_at(step, how))
        assert torch.equal(run(pipe), expected)
        assert rows in (None, decisions(pipe))
        rows = decisions(pipe)
    with pytest.raises(InterruptedError) if how == "raise" else nullcontext():
        run(pipe, callback_on_step_end=stop_at(4, how))
    assert torch.equal(run(pipe, size=10, steps=8), fresh(size=10, steps=8))


@pytest.mark.peer_row(7)
def test_any_step_count(policy, tiny_wan, run, fresh):
    """1 to 50 steps on one pipeline, each as on a fresh one."""
    pipe = diffcache.wrap(tiny_wan(), policy)
    for steps in (4, 50, 1, 28, 2, 8):
        call = {"steps": steps, "guidance": 1.0}
        assert torch.equal(run(pipe, **call), fresh(**call)), steps
        assert diffcache.report(pipe).summary["steps"] == steps


@pytest.mark.peer_row(8)
def test_any_size_batch_and_guidance(policy, tiny_wan, run, fresh):
    """Sizes, frames, batches, prompts, guidance on and off on one pipeline."""
    pipe = diffcache.wrap(tiny_wan(), policy)
    for call in (
        {"size": 8},
        {"size": 12, "guidance": 1.0},
        {"frames": 3},
        {"batch": 2},
        {"batch": 2, "guidance": 1.0},
        {"seed": 5},
        {},
    ):
        assert torch.equal(run(pipe, **call), fresh(**call)), call


@pytest.mark.peer_row(27)
def test_few_steps_are_computed_in_full(policy, tiny_wan, run, plain, reused):
    """Below 8 steps every policy is exact, unless it is forced."""
    pipe = diffcache.wrap(tiny_wan(), policy)
    assert torch.equal(run(pipe, steps=7), plain(steps=7)) and reused(pipe) == 0


def switch_at(step, scale):
    """A callback that sets the guidance scale after a step, as some users do."""

    def callback(pipe, index, t, tensors):
        if index == step:
            pipe._guidance_scale = scale
        return tensors

    return callback


@pytest.mark.peer_row(1)
@pytest.mark.parametrize(("before", "after"), [(5.0, 1.0), (1.0, 5.0)])
def test_guidance_switched_in_mid_run(policy, exact_run, tiny_wan, run, decisions, before, after):
    """A branch comes or goes after step 3; exact settings are exact, branches are right."""
    call = {"guidance": before, "callback_on_step_end": switch_at(3, after)}
    pipe = diffcache.wrap(tiny_wan(), policy)
    for _ in range(2):
        out = run(pipe, **call)
        rows = decisions(pipe)
        uncond = [row[2] for row in rows if row[1] == "uncond"]
        assert len([row for row in rows if row[1] == "cond"]) == 9
        assert uncond == list(range(4) if before > 1 else range(4, 9))
        assert torch.isfinite(out).all()
    assert exact_run(pipe, **call)


@pytest.fixture
def exact_run(policy, tiny_wan, run):
    """Whether a pipe wrapped with exact settings gives what a plain one does."""

    def check(pipe, **call):
        diffcache.wrap(pipe, policy, **policy.exact)
        return torch.equal(run(pipe, **call), run(tiny_wan(), **call))

    return check


@pytest.mark.peer_row(1)
@pytest.mark.parametrize("off", [(4, 5), (3, 4, 5, 6, 7)])
def test_guidance_interval(policy, tiny_wan, run, off, exact_run):
    """Guidance off for some steps and on again: no branch gets another one's output."""
    outputs = {"cond": [], "uncond": []}

    def callback(pipe, index, t, tensors):
        pipe._guidance_scale = 1.0 if index + 1 in off else 5.0
        return tensors

    pipe = diffcache.wrap(tiny_wan(), policy)

    def see(module, args, output):
        row = diffcache.report(pipe).rows[-1]
        outputs[row.branch].append((row, output[0].clone()))

    handle = pipe.transformer.register_forward_hook(see)
    call = {"callback_on_step_end": callback, "seed": 3}
    run(pipe, **call)
    assert [row.step for row, _ in outputs["uncond"]] == [i for i in range(9) if i not in off]
    assert len(outputs["cond"]) == 9
    for (_, cond), (_, uncond) in zip(outputs["cond"], outputs["uncond"], strict=False):
        assert not torch.equal(cond, uncond)
    handle.remove()
    assert exact_run(pipe, **call)


@pytest.mark.peer_row(32)
def test_prompt_switched_in_mid_run(policy, tiny_wan, run, decisions, exact_run):
    """New conditioning after step 4: the next call of its branch is computed; it is one run."""
    other = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(9))

    def callback(pipe, index, t, tensors):
        if index == 4:
            tensors["prompt_embeds"] = other
        return tensors

    call = {
        "callback_on_step_end": callback,
        "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"],
    }
    pipe = diffcache.wrap(tiny_wan(), policy)
    run(pipe, **call)
    rows = decisions(pipe)
    assert len([row for row in rows if row[0] == "transformer"]) >= 18
    cond = [row for row in rows if row[1] == "cond"]
    assert cond[5][-1] == "compute"
    assert exact_run(pipe, **call)


def test_disabled_is_plain_and_leaves_no_trace(policy, tiny_wan, run, plain, fresh):
    """Whole runs within and around `disabled`, nested too, and after an exception in it."""
    pipe = diffcache.wrap(tiny_wan(), policy)
    run(pipe)
    with diffcache.disabled(pipe), diffcache.disabled(pipe) as same:
        assert same is pipe and torch.equal(run(pipe), plain())
    with pytest.raises(InterruptedError), diffcache.disabled(pipe):
        run(pipe, callback_on_step_end=stop_at(2, "raise"))
    assert torch.equal(run(pipe), fresh())


def test_disabled_in_mid_run(policy, tiny_wan, run, ledgers):
    """Within a run: the steps inside are plain, nothing stale is used after them."""
    pipe, seen = diffcache.wrap(tiny_wan(), policy), []
    paused = []

    def callback(pipe, index, t, tensors):
        if index == 3:
            paused.append(diffcache.disabled(pipe))
            paused[0].__enter__()
            seen.append([state.store.bytes_held for state in ledgers(pipe)])
        if index == 5:
            paused[0].__exit__(None, None, None)
        return tensors

    run(pipe, callback_on_step_end=callback)
    rows = diffcache.report(pipe).rows
    after = [row for row in rows if row.timestep <= pipe.scheduler.timesteps[6]]
    assert seen == [[0]] and {row.decision for row in after[:2]} == {"compute"}


def test_wrapping_again_replaces_the_policy(policy, tiny_wan, run, fresh, plain):
    """Whatever the policy was before, and with the history of a cancelled run."""
    pipe = diffcache.wrap(tiny_wan(), "hold", fraction=0.3)
    with pytest.raises(InterruptedError):
        run(pipe, callback_on_step_end=stop_at(5, "raise"))
    diffcache.wrap(pipe, policy)
    assert torch.equal(run(pipe), fresh())
    assert diffcache.report(pipe).summary["policy"] == policy.name
    diffcache.wrap(pipe, policy, **policy.exact)
    assert torch.equal(run(pipe), plain())
    assert torch.equal(run(diffcache.unwrap(pipe)), plain())


@pytest.mark.parametrize("second_wrapped", [True, False])
def test_two_pipelines_share_a_denoiser(policy, tiny_wan, run, fresh, second_wrapped):
    """Both see one cache; each run is as on a fresh pipeline; unwrapping either takes it off."""
    one = diffcache.wrap(tiny_wan(), policy)
    two = tiny_wan()
    two.transformer = one.transformer
    if second_wrapped:
        diffcache.wrap(two, policy)
    assert torch.equal(run(one), fresh())
    again = run(two, steps=12)
    assert torch.equal(run(two, steps=12), again)
    if second_wrapped:
        assert torch.equal(again, fresh(steps=12))
    assert diffcache.report(two).rows == diffcache.report(one).rows
    assert torch.equal(run(one), fresh())
    diffcache.wrap(two, policy, **policy.exact)
    assert torch.equal(run(one), run(tiny_wan()))
    diffcache.unwrap(one)
    with pytest.raises(ValueError, match="not wrapped"):
        diffcache.report(two)
    diffcache.unwrap(two)
    assert torch.equal(run(two), run(tiny_wan()))


@pytest.mark.peer_row(27)
def test_shorter_timesteps(policy, tiny_wan, loop, decisions):
    """An image-to-image loop begins inside the schedule: twice the same, first step computed."""
    pipe = diffcache.wrap(tiny_wan(), policy)

    def part(begin):
        pipe.scheduler.set_timesteps(16)
        return loop(pipe.transformer, pipe.scheduler.timesteps[begin:])

    full = part(0)
    first = part(6)
    rows = decisions(pipe)
    assert len(rows) == 10 and rows[0][-1] == "compute" and [row[2] for row in rows] == [*range(10)]
    assert all(map(torch.equal, part(6), first))
    assert {row[-1] for row in decisions(pipe) if len(rows) == 10} == {row[-1] for row in rows}
    assert all(map(torch.equal, part(0), full))
    part(10)
    assert {row[-1] for row in decisions(pipe)} == {"compute"}  # 6 steps are too few

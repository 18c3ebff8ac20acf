"""Schedulers by a short name: the class that suits the pipeline, with the shift it had."""

from types import SimpleNamespace

import diffusers
import pytest
import torch

from diffcache.cli.schedulers import CLASSES, use_scheduler

FLOW = {
    "unipc": diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    ),
    "euler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
}


def exchanged(scheduler, name):
    pipe = SimpleNamespace(scheduler=scheduler)
    use_scheduler(pipe, name)
    return pipe.scheduler


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("before", FLOW)
def test_a_flow_stays_a_flow_with_its_shift(before, name):
    made = exchanged(FLOW[before], name)
    assert type(made).__name__ == CLASSES[name][0]
    made.set_timesteps(10)
    wanted = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    wanted.set_timesteps(10)
    # The classes place their steps a little differently; without the shift it would be 0.5.
    middle = (float(s.sigmas.unique()[len(s.sigmas.unique()) // 2]) for s in (made, wanted))
    assert next(middle) == pytest.approx(next(middle), abs=0.06)


def test_there_and_back_is_the_same():
    back = exchanged(exchanged(FLOW["unipc"], "euler"), "unipc")
    for scheduler in (back, FLOW["unipc"]):
        scheduler.set_timesteps(7)
    assert torch.equal(back.timesteps, FLOW["unipc"].timesteps)


@pytest.mark.parametrize("name", CLASSES)
def test_noise_prediction_keeps_its_schedule(name):
    before = diffusers.DDIMScheduler(beta_start=0.001, beta_end=0.02, beta_schedule="linear")
    made = exchanged(before, name)
    assert type(made).__name__ == CLASSES[name][1]
    assert torch.equal(made.betas, before.betas)


def test_unknown_names_and_pipelines_without_a_scheduler():
    with pytest.raises(ValueError, match="did you mean 'euler'"):
        exchanged(FLOW["euler"], "eule")
    with pytest.raises(ValueError, match="no scheduler to exchange"):
        exchanged(None, "euler")

"""Loops of other kinds: Heun, rising times, no scheduler, copied schedulers."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler
from toys import TIMES, Own, equal, reused, rows, start

import diffcache

COND = torch.full((1, 1, 6), 0.3)


def drive(module, times, cond=COND):
    """An Euler loop over x [1, 5, 6]; the outputs."""
    x, outputs = start(1, 5, 6), []
    for t in times:
        outputs.append(module(x, t, cond))
        x = x - outputs[-1] / 40
    return outputs


class Loop:
    """A denoiser and a scheduler with names, as much of a pipeline as wrap asks for."""

    def __init__(self, scheduler, transformer=None):
        self.transformer, self.scheduler = transformer or Own(), scheduler

    @property
    def components(self):
        return {"transformer": self.transformer, "scheduler": self.scheduler}

    def __call__(self, steps, form=lambda t: t, scheduler=None):
        scheduler = scheduler or self.scheduler
        scheduler.set_timesteps(steps)
        x = start(1, 5, 6)
        for t in scheduler.timesteps:
            out = self.transformer(x, form(t).expand(1), COND)
            x = scheduler.step(out, t, x, return_dict=False)[0]
        return x


@pytest.mark.parametrize("name", ["hold", "taylorseer", "balanced"])
def test_heun(name):
    """Each time but the first twice: one trajectory, its steps counted once; twice the same."""
    plain = Loop(FlowMatchHeunDiscreteScheduler())(12)
    pipe = diffcache.wrap(Loop(FlowMatchHeunDiscreteScheduler()), name)
    found = pipe(12)
    calls = len(pipe.scheduler.timesteps)
    assert len(rows(pipe)) == calls and torch.isfinite(found).all()
    assert max(row.step for row in rows(pipe)) == len(set(pipe.scheduler.timesteps.tolist())) - 1
    assert reused(pipe) > 0 and rows(pipe)[0].decision == "compute"
    assert torch.equal(pipe(12), found) and len(rows(pipe)) == calls
    diffcache.wrap(pipe, name, **diffcache.get_policy(name).exact)
    assert torch.equal(pipe(12), plain)


@pytest.mark.parametrize(
    "form", [lambda t: 1 - t / 1000, lambda t: t / 1000], ids=["rising", "unit"]
)
@pytest.mark.parametrize("name", ["hold", "taylorseer", "balanced"])
def test_times_in_other_forms(name, form):
    """Lumina's 1 - t / 1000 and Flux's t / 1000: decisions are those of plain timesteps."""
    usual = diffcache.wrap(Loop(FlowMatchEulerDiscreteScheduler(shift=3.0)), name)
    usual(20)
    pipe = diffcache.wrap(Loop(FlowMatchEulerDiscreteScheduler(shift=3.0)), name)
    pipe(20, form)
    if name != "balanced":  # its decisions follow the observed error
        assert [r.decision for r in rows(pipe)] == [r.decision for r in rows(usual)]
    assert [r.step for r in rows(pipe)] == list(range(20))
    assert [r.sigma for r in rows(pipe)] == [r.sigma for r in rows(usual)]


@pytest.mark.parametrize("rising", [False, True])
@pytest.mark.parametrize("name", ["hold", "taylorseer", "balanced"])
def test_bare_module_without_a_scheduler(name, rising):
    """Falling or rising times, three runs in a row, none announced."""
    times = [1 - t / 1000 for t in TIMES] if rising else TIMES
    module = diffcache.wrap(Own(), name)
    first = drive(module, times)
    assert reused(module) > 0
    for _ in range(2):
        assert equal(drive(module, times), first)
        assert [row.step for row in rows(module)] == list(range(12))


def test_a_copied_scheduler_drives_itself():
    """LTX and SkyReels deepcopy theirs: the loop over the copy works, the original stays put."""
    pipe = diffcache.wrap(Loop(FlowMatchEulerDiscreteScheduler(shift=3.0)), "hold")
    expected = pipe(12)
    original = pipe.scheduler.timesteps
    copied = copy.deepcopy(pipe.scheduler)
    for _ in range(2):
        found = pipe(12, scheduler=copied)
        assert torch.isfinite(found).all() and rows(pipe)[-12].decision == "compute"
        assert [row.step for row in rows(pipe)[-12:]] == list(range(12))
    assert pipe.scheduler.timesteps is original
    assert torch.equal(pipe(12), expected)


def test_a_copied_scheduler_in_every_step():
    """Two schedulers take turns over one denoiser (video and audio): no exception, all finite."""
    pipe = diffcache.wrap(Loop(FlowMatchEulerDiscreteScheduler(shift=3.0)), "hold")
    other = copy.deepcopy(pipe.scheduler)
    pipe.scheduler.set_timesteps(12)
    other.set_timesteps(12)
    x, y, again = start(1, 5, 6), start(1, 5, 6) + 1, Own()
    for t in pipe.scheduler.timesteps:
        for z, cond in ((x, COND), (y, COND + 1)):
            out = pipe.transformer(z, t.expand(1), cond)
            near = (out - again(z, t.expand(1), cond)).abs().mean()
            assert near < 0.5
    assert len(rows(pipe)) == 24 and len({row.branch for row in rows(pipe)}) == 2

"""The model site: whole outputs of any form are rebuilt, in the form in which they came."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.utils import BaseOutput
from torch import nn

import diffcache

TIMES = [1000.0 - 60 * i for i in range(12)]


@dataclass
class Pair(BaseOutput):
    """Video and audio, as LTX-2 has it."""

    sample: torch.Tensor
    audio: torch.Tensor


class Model(nn.Module):
    """Hands out x scaled by its time, in the form of `make`."""

    def __init__(self, make=lambda x: x):
        super().__init__()
        self.make = make

    def forward(self, hidden_states, timestep):
        return self.make(hidden_states * (1 + timestep / 1000))


def inputs(shape=(2, 4, 3), dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(len(TIMES), *shape, generator=generator).to(dtype)


def run(module, xs=None):
    xs = inputs() if xs is None else xs
    return [module(x, t) for x, t in zip(xs, TIMES, strict=True)]


def hold(module, **settings):
    """Computed at steps 0, 1, 2 and every third from there."""
    gate = {"kind": "interval", "interval": 3}
    return diffcache.wrap(module, "hold", gate=gate, tail_steps=0, **settings)


COMPUTED = {0, 1, 2, 5, 8, 11}
FORMS = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x,),
    "pair": lambda x: (x, x[:1] * 2),
    "list": lambda x: [x, x + 1],
    "dict": lambda x: {"sample": x, "flag": True},
    "none": lambda x: (x, None),
    "output": lambda x: Transformer2DModelOutput(sample=x),
    "two": lambda x: Pair(sample=x, audio=x[:, :2]),
}


def leaves(output):
    return [x for x in torch.utils._pytree.tree_flatten(output)[0]]


@pytest.mark.parametrize("name", FORMS)
def test_reused_outputs_have_the_form_of_computed_ones(name):
    """Type, structure, shapes, dtypes; the values are those of the last computed step."""
    outputs = run(hold(Model(FORMS[name])))
    plain = run(Model(FORMS[name]))
    last = 0
    for step, output in enumerate(outputs):
        last = step if step in COMPUTED else last
        assert type(output) is type(plain[step])
        assert isinstance(output, dict) is isinstance(plain[step], dict)
        for ours, theirs in zip(leaves(output), leaves(plain[last]), strict=True):
            same = torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs
            assert same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("policy", ["hold", "forecast"])
def test_dtype_is_kept(policy, dtype):
    """Also where the weighted sum is made in fp32."""
    outputs = run(diffcache.wrap(Model(), policy), inputs(dtype=dtype))
    assert {output.dtype for output in outputs} == {dtype}
    assert all(torch.isfinite(output).all() for output in outputs)


def test_reused_outputs_are_the_callers_own():
    """Schedulers write into what they are given: the next reuse is not touched by that."""
    module, xs = hold(Model()), inputs()
    for x, t in zip(xs, TIMES, strict=True):
        module(x, t).zero_()
    assert torch.equal(run(hold(Model()))[4], run(Model())[2])
    reused = [row.step for row in diffcache.report(module).rows if row.decision == "reuse"]
    assert reused == [3, 4, 6, 7, 9, 10]
    fresh = hold(Model())
    outputs = []
    for x, t in zip(xs, TIMES, strict=True):
        output = fresh(x, t)
        outputs.append(output.clone())
        output.zero_()
    assert all(torch.equal(a, b) for a, b in zip(outputs, run(hold(Model())), strict=True))


def test_residual_form_by_hand():
    """out = x + (last out - last in)."""
    outputs, xs = run(hold(Model(), form="residual")), inputs()
    plain, last = run(Model()), 0
    for step, output in enumerate(outputs):
        last = step if step in COMPUTED else last
        assert torch.allclose(output, xs[step] + plain[last] - xs[last], atol=1e-6)


def test_residual_uses_the_noise_channels_alone():
    """Image-to-video: condition channels are appended to the noisy ones."""
    narrow = lambda x: x[:, :3]  # noqa: E731
    outputs, xs = run(hold(Model(narrow), form="residual")), inputs()
    plain = run(Model(narrow))
    assert torch.allclose(outputs[4], xs[4][:, :3] + plain[2] - xs[2][:, :3], atol=1e-6)


@pytest.mark.parametrize("make", [lambda x: x[..., :1], lambda x: x.mean(), lambda x: x[:, :, 0]])
def test_residual_of_another_shape_is_held(make):
    """Where no input fits the output, the output itself is remembered."""
    outputs, plain = run(hold(Model(make), form="residual")), run(Model(make))
    for step in (3, 4):
        assert torch.equal(outputs[step], plain[2])


def test_a_model_that_writes_into_its_input():
    """The residual is taken against what came in, not against what was left of it."""

    class Writing(Model):
        def forward(self, hidden_states, timestep):
            return hidden_states.mul_(1 + timestep / 1000).clone()

    outputs, xs = run(hold(Writing(), form="residual"), inputs().clone()), inputs()
    assert torch.allclose(outputs[3], xs[3] + xs[2] * TIMES[2] / 1000, atol=1e-6)


@pytest.mark.parametrize("make", [lambda x: None, lambda x: "x", lambda x: (x, x.argmax())])
def test_outputs_that_cannot_be_rebuilt(make):
    """Nothing, text, integers: computed every time, with the reason in the rows."""
    module = hold(Model(make))
    run(module)
    rows = diffcache.report(module).rows
    assert {row.decision for row in rows} == {"compute"}
    assert any("no floating tensors" in row.reason for row in rows)


def test_two_forms_of_call():
    """return_dict switched in mid-run: each call gets the form it asked for."""

    class Both(Model):
        def forward(self, hidden_states, timestep, return_dict=True):
            out = super().forward(hidden_states, timestep)
            return {"sample": out} if return_dict else (out,)

    module, xs = hold(Both()), inputs()
    for step, (x, t) in enumerate(zip(xs, TIMES, strict=True)):
        as_dict = step % 2 == 0
        output = module(x, t, return_dict=as_dict)
        assert isinstance(output, dict) is as_dict


def test_gradients_are_never_cached():
    """A call that records gradients is computed: training through a wrapped model is right."""

    class Weighted(Model):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, hidden_states, timestep):
            return self.weight * hidden_states

    module = hold(Weighted())
    for x, t in zip(inputs(), TIMES, strict=True):
        assert module(x, t).requires_grad
    assert {row.reason for row in diffcache.report(module).rows} == {"gradients are recorded"}


@pytest.mark.parametrize("policy", ["hold", "easycache", "forecast"])
def test_batch_equals_single_items(policy):
    """An item in a batch equals the same item alone, or the policy decides per batch."""
    decides = diffcache.get_policy(policy).decides
    together = run(diffcache.wrap(Model(), policy))
    alone = [run(diffcache.wrap(Model(), policy), inputs()[:, i : i + 1]) for i in range(2)]
    equal = all(
        torch.allclose(both[i : i + 1], one, atol=1e-5)
        for i in range(2)
        for both, one in zip(together, alone[i], strict=True)
    )
    assert equal or decides == "batch"


def test_budget_too_small_for_one_step_computes():
    """Nothing fits: every step is computed, nothing is held."""
    module = hold(Model(), max_bytes=10)
    assert all(torch.equal(a, b) for a, b in zip(run(module), run(Model()), strict=True))
    summary = diffcache.report(module).summary
    assert summary["bytes_peak"] == 0 and summary["reused"] == {"branch 0": 0}

"""Branch names: by the pipeline's words, else by what a call is conditioned on."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from diffcache.context import Clock
from diffcache.signature import Call


def call(timestep, text, batch=1, options=()):
    return Call((torch.zeros(batch, 2),), timestep, (("encoder_hidden_states", text),), options)


def text(value, batch=1):
    return torch.full((batch, 3, 4), float(value))


def test_split_guidance_has_two_branches():
    """Two conditionings in turn keep their names and count their own steps."""
    clock, cond, uncond = Clock(), text(1), text(0)
    contexts = [clock.begin(call(t, x)) for t in (900.0, 800.0, 700.0) for x in (cond, uncond)]
    names = [c.branch for c in contexts]
    assert names == names[:2] * 3 and names[0] != names[1]
    assert [c.branch_step for c in contexts] == [0, 0, 1, 1, 2, 2]
    assert contexts[0].new and not any(c.new for c in contexts[1:])


def test_order_of_calls_does_not_matter():
    """Names go by content, not by who comes first in a step."""
    clock, cond, uncond = Clock(), text(1), text(0)
    first = [clock.begin(call(900.0, x)).branch for x in (cond, uncond)]
    second = [clock.begin(call(800.0, x)).branch for x in (uncond, cond)]
    assert second == first[::-1]


def test_batched_guidance_is_one_branch():
    """Both halves in one batch are one call under one name."""
    clock, both = Clock(), torch.cat([text(0), text(1)])
    contexts = [clock.begin(call(t, both, batch=2)) for t in (900.0, 800.0, 700.0)]
    assert len({c.branch for c in contexts}) == 1
    assert contexts[0].new and not any(c.new for c in contexts[1:])


def test_guidance_switched_in_mid_run():
    """The unconditional branch joins at step 2 with a warm-up of its own."""
    clock, cond, uncond = Clock(), text(1), text(0)
    for t in (900.0, 800.0):
        clock.begin(call(t, cond))
    contexts = [clock.begin(call(700.0, x)) for x in (cond, uncond)]
    assert [c.branch_step for c in contexts] == [2, 0]
    assert [c.new for c in contexts] == [None, None]


def test_pipeline_words_tell_equal_texts_apart():
    """Prompt and negative prompt may be the same; cache_context still names two branches."""
    clock, same = Clock(), text(1)
    for step, t in enumerate((900.0, 800.0, 700.0)):
        for name in ("cond", "uncond"):
            clock.named = (name, {})
            context = clock.begin(call(t, same))
            assert (context.branch, context.branch_step) == (name, step)
            assert (context.new is None) == (step > 0 or name == "uncond")


def test_options_tell_equal_texts_apart():
    """Skip-layer guidance: the same text with other options is another branch."""
    clock, same = Clock(), text(1)
    options = ((), (("skip_layers", (7, 8)),))
    names = [clock.begin(call(900.0, same, options=o)).branch for o in options]
    assert names[0] != names[1]


def test_equal_content_in_a_new_tensor_goes_on():
    """Pipelines that rebuild their conditioning at each step are one branch."""
    clock = Clock()
    contexts = [clock.begin(call(t, text(1).clone())) for t in (900.0, 800.0, 700.0)]
    assert len({c.branch for c in contexts}) == 1 and not any(c.new for c in contexts[1:])


@pytest.mark.parametrize("named", [False, True])
def test_other_content_never_goes_on(named):
    """A prompt exchanged in mid-run: a new trajectory under its name, or a branch of its own."""
    clock = Clock()
    clock.named = ("cond", {}) if named else None
    before = [clock.begin(call(t, text(1))) for t in (900.0, 800.0)][-1]
    after = clock.begin(call(700.0, text(2)))
    assert after.new == "conditioning changed" if named else after.branch != before.branch
    assert after.branch_step == 0


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("inference", [False, True])
def test_conditioning_mutated_in_place(named, inference):
    """The same tensor with other content (an action buffer) is another conditioning."""
    with torch.inference_mode(inference):
        clock, buffer = Clock(), text(1)
        clock.named = ("cond", {}) if named else None
        before = [clock.begin(call(t, buffer)) for t in (900.0, 800.0)][-1]
        buffer.fill_(2.0)
        after = clock.begin(call(700.0, buffer))
    assert after.new is not None or after.branch != before.branch


def test_inference_tensors():
    """Tensors without a version counter are named like any others."""
    with torch.inference_mode():
        clock, cond, uncond = Clock(), text(1), text(0)
        contexts = [clock.begin(call(t, x)) for t in (900.0, 800.0) for x in (cond, uncond)]
    assert [c.branch_step for c in contexts] == [0, 0, 1, 1]


def test_id_reused_after_free():
    """A new tensor at a freed one's address is read anew, not taken for the old one."""
    clock, ids = Clock(), set()
    reused = 0
    for value in range(60):
        fresh = text(value)
        reused += id(fresh) in ids
        ids.add(id(fresh))
        digest = clock.begin(call(1000.0 - value, fresh))
        seen = clock.begin(call(1000.0 - value - 0.5, text(value)))
        assert seen.branch == digest.branch
        del fresh
    assert reused > 0


def test_conditioning_is_not_kept_alive():
    """Names hold digests, not tensors."""
    clock = Clock()
    for value in range(20):
        clock.begin(call(1000.0 - value, torch.full((3, 5, 7), float(value))))
    gc.collect()
    held = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.shape == (3, 5, 7)]
    assert not held


@pytest.mark.parametrize("kind", ["bfloat16", "int", "bool", "empty", "strided", "scalar", "grad"])
def test_conditioning_of_any_kind(kind):
    """Whatever tensor conditions a call, equal content is equal and other content is not."""
    make = {
        "bfloat16": lambda v: torch.full((2, 3), v, dtype=torch.bfloat16),
        "int": lambda v: torch.full((2, 3), int(v)),
        "bool": lambda v: torch.tensor([True, v > 1]),
        "empty": lambda v: torch.zeros(int(v), 0),
        "strided": lambda v: torch.full((4, 6), v).t()[::2],
        "scalar": lambda v: torch.tensor(v),
        "grad": lambda v: torch.full((2,), v, requires_grad=True),
    }[kind]
    clock = Clock()
    names = [clock.begin(call(900.0, make(value))).branch for value in (1.0, 2.0, 1.0)]
    assert names[0] == names[2] != names[1]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("named", [False, True])
def test_no_branch_ever_mixes_conditionings(seed, named):
    """Forty conditionings at random: a call that goes on has the conditioning of its branch."""
    rng, clock, known = random.Random(seed), Clock(), {}
    for step in range(300):
        value = rng.randrange(40) if rng.random() < 0.5 else step // 60
        clock.named = (rng.choice(["cond", "uncond"]), {}) if named else None
        context = clock.begin(call(1000.0 - step, text(value)))
        if context.new is not None:
            known = {}
        assert known.setdefault(context.branch, value) == value

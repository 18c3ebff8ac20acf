"""What users of other caches complained of, each as the right behaviour of ours."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import diffcache

pytestmark = pytest.mark.filterwarnings("ignore::diffcache.DiffcacheWarning")
TIMES = [1000.0 - 50 * i for i in range(12)]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


class Block(nn.Module):
    """h + tanh(W h + text) / 2."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, hidden_states, text):
        return hidden_states + torch.tanh(self.linear(hidden_states) + text) / 2


class Bare(nn.Module):
    """A denoiser of one's own, called (x, t, cond); x is [batch, tokens, 6]."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.requires_grad_(False)

    def forward(self, x, t, cond, *, skip_layers=None, control=None, **others):
        x = x + t / 1000
        for i, layer in enumerate(self.layers):
            if not skip_layers or i not in skip_layers:
                x = layer(x, cond)
        return x if control is None else x + control


def latents(batch=1, seed=0, tokens=5):
    return torch.randn(batch, tokens, 6, generator=torch.Generator().manual_seed(seed))


def rows(target):
    return diffcache.report(target).rows


def reused(target):
    return sum(row.decision == "reuse" for row in rows(target))


def drive(module, passes, times=TIMES, x=None, seed=0):
    """An Euler loop; `passes(step)` lists the keyword arguments of each call. Outputs by step."""
    x = latents(seed=seed) if x is None else x
    outputs = []
    for step, t in enumerate(times):
        found = [module(x, t, **call) for call in passes(step)]
        outputs.append(found)
        x = x - found[0] / len(times)
    return outputs


COND, UNCOND = 2 * torch.ones(1, 1, 6), -2 * torch.ones(1, 1, 6)
SITES = ["model", "stack", "span", "block"]


def equal(a, b):
    return all(
        torch.equal(x, y)
        for one, two in zip(a, b, strict=True)
        for x, y in zip(one, two, strict=True)
    )


@pytest.mark.parametrize("site", SITES)
def test_row_1_no_cooperation_of_the_pipeline_is_needed(site):
    """Two passes that nobody names: two branches, each with its own steps; exact is exact."""
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


def test_row_6_nothing_to_take_hold_of():
    """A stack site without blocks is refused at wrap with what to do instead."""

    class Flat(nn.Module):
        def forward(self, x, t):
            return x * t

    with pytest.raises(ValueError, match="site='model'"):
        diffcache.wrap(Flat(), "first_block")
    with pytest.raises(ValueError, match="timestep"):
        diffcache.wrap(nn.Linear(2, 2), "hold")


def test_row_6_nothing_skipped_is_said():
    """A threshold that never fires: the note names the reason, strict raises."""
    module = diffcache.wrap(Bare(), "first_block", threshold=1e-9, strict=True)
    drive(module, lambda step: [{"cond": COND}])
    with pytest.raises(diffcache.DiffcacheError, match="threshold"):
        diffcache.report(module)
    diffcache.wrap(module, "first_block", threshold=1e-9)
    drive(module, lambda step: [{"cond": COND}])
    assert any("threshold" in note for note in diffcache.report(module).summary["notes"])


@pytest.mark.parametrize("name", ["hold", "first_block", "taylorseer", "balanced"])
def test_rows_7_8_9_requests_of_any_kind_follow_each_other(name, tiny_wan, run_tiny):
    """A warm-up of 1 step at another size, then 4, 20 and 8 steps, sizes and batches changing."""
    pipe = diffcache.wrap(tiny_wan(), name)
    for call in (
        {"steps": 1, "size": 4},
        {"steps": 4, "size": 12},
        {"steps": 20},
        {"steps": 8, "batch": 2},
        {"steps": 20, "frames": 3},
        {"steps": 20},
    ):
        expected = run_tiny(diffcache.wrap(tiny_wan(), name), **call)
        assert torch.equal(run_tiny(pipe, **call), expected), call


@pytest.mark.parametrize("site", SITES)
def test_row_8_shapes_change_within_a_run(site):
    """A batch, a length and a dtype that change between two steps: computed, no exception."""
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


@pytest.mark.parametrize("site", SITES)
def test_row_12_batched_and_split_guidance_in_one_run(site):
    """Both passes in one call, in two, in one again: shapes are right and nothing is mixed."""

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


@pytest.mark.parametrize("name", ["hold", "easycache", "first_block", "taylorseer", "balanced"])
def test_row_13_image_to_video_has_more_channels_in_than_out(name, tiny_wan):
    """36 in and 16 out in the wild, 9 and 4 here: a skipped step gives the 4."""
    module = tiny_wan(in_channels=9).transformer
    settings = {"easycache": {"warmup_steps": 2, "threshold": 5.0}, "first_block": {"threshold": 1}}
    diffcache.wrap(module, name, **settings.get(name, {}))
    x = torch.randn(1, 9, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    text, shapes = torch.ones(1, 6, 16), set()
    for i, t in enumerate(TIMES):
        out = module(x * (1 - 0.02 * i), torch.tensor([t]), text, return_dict=False)[0]
        shapes.add((out.shape, out.dtype))
    assert shapes == {((1, 4, 2, 8, 8), torch.float32)} and reused(module) > 0


@pytest.mark.parametrize("first", ["wrap", "offload"])
@pytest.mark.parametrize("kind", ["model", "group"])
@pytest.mark.parametrize("name", ["hold", "first_block"])
def test_row_17_offload_in_either_order(name, kind, first, tiny_wan, run_tiny):
    """Model and group offload (sequential does not run on a CPU): as the policy without; twice."""
    settings = {"threshold": 0.5} if name == "first_block" else {}
    expected = run_tiny(diffcache.wrap(tiny_wan(), name, **settings))
    pipe = tiny_wan()
    if first == "wrap":
        diffcache.wrap(pipe, name, **settings)
    if kind == "model":
        pipe.enable_model_cpu_offload(device="cpu")
    else:
        cpu = torch.device("cpu")
        pipe.transformer.enable_group_offload(
            cpu, cpu, offload_type="block_level", num_blocks_per_group=1
        )
    if first == "offload":
        diffcache.wrap(pipe, name, **settings)
    for _ in range(2):
        assert torch.equal(run_tiny(pipe), expected)
    assert reused(pipe) > 0
    diffcache.unwrap(pipe)
    assert torch.equal(run_tiny(pipe), run_tiny(tiny_wan()))


def test_rows_18_19_memory_is_told_bounded_and_given_back(tiny_wan, run_tiny):
    """One latent for each branch is what `hold` needs; bf16 halves it; a bound holds."""
    latent = 4 * 2 * 8 * 8 * 4
    for settings, peak in (({}, 2 * latent), ({"dtype": "bfloat16"}, latent)):
        pipe = diffcache.wrap(tiny_wan(), "hold", **settings)
        run_tiny(pipe)
        summary = diffcache.report(pipe).summary
        assert summary["bytes_peak"] == peak and summary["bytes_held"] == 0
    pipe = diffcache.wrap(tiny_wan(), "hold", max_bytes=latent)
    run_tiny(pipe)
    assert diffcache.report(pipe).summary["bytes_peak"] == latent and reused(pipe) > 0


@pytest.mark.parametrize("steps", [10, 20, 27, 50])
def test_row_20_any_number_of_steps_is_cached(steps, tiny_wan, run_tiny):
    """No curve is tied to one step count; the share that is computed stays the same."""
    pipe = diffcache.wrap(tiny_wan(), "hold", fraction=0.4)
    run_tiny(pipe, steps=steps, guidance=1.0)
    computed = diffcache.report(pipe).summary["computed"]["cond"]
    assert abs(computed - 0.4 * steps) <= 0.5


@pytest.mark.parametrize(("warmup", "interval"), [(0, 3), (1, 2), (3, 5), (2, 4)])
def test_row_21_counters_follow_a_reference_automaton(warmup, interval):
    """Computed while warming up, then after every interval - 1 reuses; two runs."""
    module = diffcache.wrap(Bare(), "taylorseer", warmup_steps=warmup, interval=interval)
    expected, in_a_row = [], 0
    for step in range(12):
        compute = step < max(warmup, 1) or in_a_row == interval - 1
        in_a_row = 0 if compute else in_a_row + 1
        expected.append("compute" if compute else "reuse")
    for seed in (0, 1):
        drive(module, lambda step: [{"cond": COND}], seed=seed)
        assert [row.decision for row in rows(module)] == expected
    summary = diffcache.report(module).summary
    assert list(summary["computed"].values()) == [expected.count("compute")]
    assert list(summary["reused"].values()) == [expected.count("reuse")]


def test_row_22_few_steps_per_chunk_are_computed(tiny_wan, run_tiny):
    """Chunks of 4 steps: off by default; forced, each chunk still begins with a computed step."""
    for forced in (False, True):
        settings = {"min_steps": 0, "warmup_steps": 1, "tail_steps": 0} if forced else {}
        pipe = diffcache.wrap(tiny_wan(), "hold", **settings)
        for index in range(3):
            with diffcache.chunk(pipe, index):
                run_tiny(pipe, steps=4, guidance=1.0, seed=index)
            assert rows(pipe)[-4].decision == "compute" and rows(pipe)[-4].chunk == index
        assert (reused(pipe) > 0) == forced


def test_row_25_arguments_that_are_not_known_reach_the_forward():
    """No forward was copied: new keyword arguments pass through, at computed and kept steps."""
    module, plain = diffcache.wrap(Bare(), "hold", site="stack"), Bare()
    call = {"cond": COND, "control": torch.full((1, 5, 6), 0.5), "brand_new": object()}
    assert torch.equal(module(latents(), 1000.0, **call), plain(latents(), 1000.0, **call))
    drive(module, lambda step: [call])
    assert reused(module) > 0


@pytest.mark.parametrize("name", ["hold", "first_block", "taylorseer", "balanced"])
def test_row_27_few_steps_are_not_cached_unless_forced(name, tiny_wan, run_tiny):
    """4 and 7 steps are exact by default; `min_steps=0` forces."""
    for steps in (4, 7):
        pipe = diffcache.wrap(tiny_wan(), name)
        assert torch.equal(run_tiny(pipe, steps=steps), run_tiny(tiny_wan(), steps=steps))
    forced = {"min_steps": 0, "warmup_steps": 1}
    forced |= {"threshold": 1.0} if name == "first_block" else {"tail_steps": 0}
    pipe = diffcache.wrap(tiny_wan(), name, **forced)
    run_tiny(pipe, steps=7)
    assert reused(pipe) > 0


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("name", ["hold", "first_block", "taylorseer"])
def test_row_31_weights_may_change_before_and_between_runs(name, when, tiny_wan, run_tiny):
    """As fusing a LoRA does: the next run is that of the changed model; back again too."""

    def fuse(pipe, scale):
        for block in pipe.transformer.blocks:
            block.attn1.to_q.weight.data.add_(scale * torch.eye(24))

    changed = tiny_wan()
    fuse(changed, 0.5)
    plain = run_tiny(changed)
    expected = run_tiny(diffcache.wrap(changed, name))
    pipe = diffcache.wrap(tiny_wan(), name)
    first = run_tiny(pipe) if when == "between" else None
    fuse(pipe, 0.5)
    assert torch.equal(run_tiny(pipe), expected)
    if first is not None:
        assert not torch.equal(first, expected)
    assert torch.equal(run_tiny(diffcache.unwrap(pipe)), plain)


@pytest.mark.parametrize("site", SITES)
def test_row_34_guidance_with_three_passes(site):
    """Perturbed attention (a pass that skips layers) has its own state beside cond and uncond."""

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


def test_row_34_named_passes(tiny_wan):
    """Names given by cache_context are the branches, as many as there are."""
    module = diffcache.wrap(tiny_wan().transformer, "hold")
    x, text = torch.randn(1, 4, 2, 8, 8), torch.ones(1, 6, 16)
    for t in TIMES:
        for name in ("cond", "uncond", "perturbed"):
            with module.cache_context(name):
                module(x, torch.tensor([t]), text, return_dict=False)
    for name in ("cond", "uncond", "perturbed"):
        assert [row.step for row in rows(module) if row.branch == name] == list(range(12))

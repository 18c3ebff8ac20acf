"""The bench's parts: interpolation and verdicts by hand, pipelines of their own, shared prompts."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch

from diffcache.api import wrap
from diffcache.cli.bench_clip import Bench, Loop, separate
from diffcache.cli.bench_methods import baselines, ours, read_policies
from diffcache.cli.bench_report import shown
from diffcache.cli.bench_run import PLAIN
from diffcache.cli.bench_table import at_speed, rows
from diffcache.cli.bench_verdict import at_quality, sentences, verdicts
from diffcache.cli.loading import load_pipeline, pipeline_class
from diffcache.cli.run_call import Call, Options

CURVE = [(1.0, 50.0), (2.0, 40.0), (4.0, 30.0)]


@pytest.mark.parametrize(
    ("speed", "level"),
    [(1.0, 50.0), (1.5, 45.0), (2.0, 40.0), (3.0, 35.0), (4.0, 30.0), (0.9, None), (4.1, None)],
)
def test_fewer_steps_between_its_points(speed, level):
    assert at_speed(CURVE, speed) == level


def test_a_line_of_one_point_has_no_between():
    assert at_speed([(2.0, 40.0)], 2.0) is None and at_speed([], 2.0) is None


@pytest.mark.parametrize(
    ("quality", "reached"),
    [
        (40.0, (2.75, False)),  # 10 of 12 dB on the way from 1.5x to 3x
        (38.0, (3.0, False)),
        (34.0, (3.5, False)),
        (30.0, (4.0, True)),
        (20.0, (4.0, True)),
        (50.5, None),
    ],
)
def test_speed_at_a_quality_runs_along_the_front(quality, reached):
    points = [(1.5, 50.0), (3.0, 38.0), (4.0, 30.0), (2.0, 36.0), (1.2, 49.0), (5.0, nan)]
    assert at_quality(points, quality) == reached


def test_an_identical_clip_gives_no_slope():
    assert at_quality([(1.0, inf), (3.0, 30.0)], 40.0) == (1.0, False)
    assert at_quality([(3.0, 30.0), (2.0, nan)], 40.0) is None


def a_row(family, kind, speed, psnr, *, gating=False):
    return {
        "scheduler": "euler",
        "steps": 50,
        "method": f"{family} {speed}",
        "family": family,
        "kind": kind,
        "block_gating": gating,
        "speedup": speed,
        "psnr_mean": psnr,
    }


SYNTHETIC = [
    a_row("balanced", "ours", 2.0, 44.0),
    a_row("forecast", "ours", 4.0, 36.0),  # our front: 3x at 40 dB
    a_row("DBCache", "peer", 1.25, 40.0, gating=True),
    a_row("FirstBlockCache", "peer", 1.0, 45.0, gating=True),
    a_row("FirstBlockCache", "peer", 2.0, 35.0, gating=True),  # 1.5x at 40 dB
    a_row("SeaCache", "peer", 3.0, 42.0),
    a_row("SeaCache", "peer", 5.0, 38.0),  # 4x at 40 dB
    a_row("fewer steps", "baseline", 2.0, 39.0),
]


def test_verdict_takes_the_best_of_each_group():
    found = {verdict["quality"]: verdict for verdict in verdicts(SYNTHETIC, "speedup")}
    at_40 = found[40.0]
    assert at_40["ours"] == {"speedup": 3.0, "at_least": False}
    gating, peers, fewer = (
        at_40["against"][g] for g in ("block-gating peers", "peers of any kind", "fewer steps")
    )
    assert (gating["best"], gating["speedup"], gating["ratio"]) == ("FirstBlockCache", 1.5, 2.0)
    assert (peers["best"], peers["speedup"], peers["ratio"]) == ("SeaCache", 4.0, 0.75)
    assert (fewer["best"], fewer["ratio"]) == (None, None)
    assert "plain hold" not in at_40["against"], "not measured here"
    assert found[36.0]["ours"] == {"speedup": 4.0, "at_least": True}


def test_a_defeat_is_printed_and_named():
    found = [{**verdict, "clips": 16} for verdict in verdicts(SYNTHETIC, "speedup")]
    text = "\n".join(sentences(found))
    assert "euler, 50 steps, 40 dB in the mean (clips: 16): diffcache 3.00x" in text
    assert "peers of any kind: BEATEN by SeaCache 4.00x: 0.75 times its speed-up" in text
    assert "block-gating peers: ahead of FirstBlockCache 1.50x: 2.00 times its speed-up" in text
    assert "fewer steps: none reaches it" in text
    alone = [row for row in SYNTHETIC if row["kind"] != "ours"]
    lost = "\n".join(sentences([{**v, "clips": 1} for v in verdicts(alone, "speedup")]))
    assert "diffcache does not reach it" in lost and "BEATEN by SeaCache 4.00x" in lost


def test_the_table_leaves_out_settings_that_another_of_the_peer_beats():
    worse = a_row("SeaCache", "peer", 2.5, 41.0)
    own = a_row("forecast", "ours", 1.0, 20.0)
    assert shown([*SYNTHETIC, worse, own], "speedup") == [*SYNTHETIC, own]


def a_line(method, seconds, psnr, seed=0, **more):
    family, _, setting = method.partition("=")
    return {
        "scheduler": "",
        "steps": 10,
        "prompt": "a",
        "seed": seed,
        "method": method,
        "family": family,
        "setting": setting,
        "kind": "ours",
        "block_gating": False,
        "ssim": 0.9,
        "psnr": psnr,
        **dict.fromkeys(("seconds", "seconds_cpu", "seconds_total"), seconds),
        **dict.fromkeys(("reference_seconds", "reference_seconds_cpu"), 6.0),
        "reference_seconds_total": 12.0,
        "work": 5.0,
        "reference_work": 20.0,
        **more,
    }


def test_a_row_is_the_median_of_ratios_to_the_same_clip():
    clips = enumerate(((2.0, 40), (3.0, 44), (1, 30)))
    lines = [a_line("forecast", seconds, psnr, seed) for seed, (seconds, psnr) in clips]
    lines[2]["reference_seconds"] = 9.0  # a slow moment, for both
    for seed in range(3):
        lines += [
            a_line("fewer steps=5", 3.0, 36.0, seed),
            a_line("fewer steps=2", 1.5, 26.0, seed),
        ]
    lines += [{"scheduler": "", "steps": 10, "method": "broken", "failed": "no"}]
    row, *rest = rows(lines, "speedup")
    assert (row["speedup"], row["speedup_cpu"], row["speedup_total"]) == (3.0, 3.0, 6.0)
    assert (row["computed"], row["clips"]) == (2.5, 3)
    assert (row["psnr_mean"], row["psnr_min"]) == (38.0, 30.0)
    assert row["psnr_p5"] == pytest.approx(31.0)
    assert row["psnr_mean_vs_fewer"] == pytest.approx(38 - 31)  # half-way from 2x to 4x
    assert row["psnr_p5_vs_fewer"] == pytest.approx(0)
    assert row["attributes_changed"] is None and len(rest) == 2


def test_a_method_on_fewer_clips_is_held_against_fewer_steps_on_those_clips():
    lines = [a_line("peer", 2.0, 40, seed=0)]
    for seed, level in ((0, 30.0), (1, 50.0)):
        lines += [a_line(f"fewer steps={n}", 6 / n, level, seed) for n in (2, 4)]
    lines.append(a_line("forecast", 2.0, 40.0, 0))
    lines.append(a_line("forecast", 2.0, 40.0, 1))
    found = {row["method"]: row for row in rows(lines, "speedup")}
    assert found["peer"]["psnr_mean_vs_fewer"] == 10.0
    assert found["forecast"]["psnr_mean_vs_fewer"] == 0.0


def test_grids():
    keys = [
        method.key for method in read_policies(["forecast:fraction=0.3|0.5,correct=true|false"])
    ]
    corrected = [(f, correct) for f in (0.3, 0.5) for correct in (True, False)]
    assert keys == [f"forecast fraction={f}, correct={correct}" for f, correct in corrected]
    assert [m.policy.name for m in ours()][:3] == ["quality", "balanced", "fast"]
    counts = [method.steps for method in baselines(50) if method.steps]
    assert counts == sorted(set(counts), reverse=True) and {23, 16, 10, 6} <= set(counts)
    assert all(1 < method.steps < 8 for method in baselines(8) if method.steps)


@pytest.fixture(scope="module")
def pipe(tiny_demo):
    return load_pipeline(tiny_demo, device="cpu")


@pytest.fixture
def call(tiny_demo):
    return Call.plan(pipeline_class(tiny_demo), Options(), tiny_demo)


def test_separate_pipelines_share_weights_and_nothing_else(pipe):
    before = dict(vars(pipe.transformer))
    own = wrap(separate(pipe), "hold")
    pairs = zip(own.transformer.parameters(), pipe.transformer.parameters(), strict=True)
    assert all(a is b for a, b in pairs)
    assert own.transformer is not pipe.transformer and own.scheduler is not pipe.scheduler
    assert vars(pipe.transformer) == before and "_diffcache_pipeline" not in vars(pipe)
    blocks = zip(own.transformer.blocks, pipe.transformer.blocks, strict=True)
    assert all(a is not b for a, b in blocks)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_prompt_is_encoded_once_and_clips_stay_those_of_the_pipeline(
    pipe, tiny_demo, monkeypatch, guidance
):
    options = Options(guidance=guidance)
    call = Call.plan(pipeline_class(tiny_demo), options, tiny_demo)
    text, seed = "a red circle", 5
    wanted = pipe(
        text,
        num_inference_steps=8,
        generator=torch.Generator().manual_seed(seed),
        **{n: v for n, v in call.arguments.items() if n != "num_inference_steps"},
    ).frames[0]
    encoded = []
    forward = type(pipe.text_encoder).forward

    def count(*args, **kwargs):
        encoded.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(type(pipe.text_encoder), "forward", count)
    bench = Bench(pipe, call, 8)
    first, figures = bench.clip(PLAIN, text, seed)
    second, _ = bench.clip(read_policies(["forecast:fraction=1.0"])[0], text, seed)
    assert len(encoded) == (2 if guidance > 1 else 1)
    assert (first == wanted).all() and (second == wanted).all()
    passes = 2 if guidance > 1 else 1
    assert figures["work"] == pytest.approx(8 * passes)
    assert figures["seconds_cpu"] > 0 and 0 < figures["seconds"] < figures["seconds_total"]


def test_work_counts_what_a_hook_skips_within_a_block(pipe, call):
    """A block whose forward another library replaces is called, but does no work."""
    own = separate(pipe)
    for block in own.transformer.blocks[1:]:
        block.forward = lambda hidden, *args, **kwargs: hidden
    steps = {"num_inference_steps": 4, **{k: call.arguments[k] for k in ("height", "width")}}
    with Loop.watching(own) as loop:
        own("a", output_type="latent", num_frames=5, max_sequence_length=16, **steps)
    assert loop.work == pytest.approx(4 * 2 / len(own.transformer.blocks))

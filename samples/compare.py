"""Compares `forecast`, with and without its correction, with fewer steps and plain hold.

Prompts are held out from the model's training and are not the demo's, whose clips the policy's
constants were chosen on. Prints one table for each scheduler: computed forwards per branch, PSNR on
decoded frames against the uncached clip of the same scheduler and seed (dB). From the repository:

    python -m samples.compare --prompts 8 --schedulers unipc,euler,heun,dpm --fraction 0.4
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import mean, quantiles
from typing import Any

import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
)

import diffcache
from diffcache.cli import demo_model_path
from diffcache.metrics import psnr
from samples.train.clips import held_out_scenes

STEPS = 50
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "unipc": UniPCMultistepScheduler.from_config,
    "unipc5": lambda config: UniPCMultistepScheduler.from_config(config, flow_shift=5.0),
    "euler": lambda _: FlowMatchEulerDiscreteScheduler(shift=2.0),
    "heun": lambda _: FlowMatchHeunDiscreteScheduler(shift=2.0),
    "dpm": DPMSolverMultistepScheduler.from_config,
}


def clip(pipe: Any, prompt: str, seed: int, steps: int) -> torch.Tensor:
    """Frames [F, H, W, C] in [0, 1]."""
    frames = pipe(
        prompt,
        height=64,
        width=64,
        num_frames=17,
        num_inference_steps=steps,
        guidance_scale=2.0,
        generator=torch.Generator().manual_seed(seed),
        max_sequence_length=64,
        output_type="pt",
    ).frames[0]
    return frames.permute(0, 2, 3, 1)


def row(name: str, computed: float, values: list[float]) -> str:
    low = quantiles(values, n=20, method="inclusive")[0]
    return f"{name:22} {computed:8.1f} {mean(values):8.1f} {low:8.1f} {min(values):8.1f}"


def compare(pipe: Any, prompts: list[str], fraction: float) -> None:
    """One table; "fewer steps" runs the share of solver steps that `forecast` computes."""
    clips = list(enumerate(prompts))
    full = [clip(pipe, prompt, seed, STEPS) for seed, prompt in clips]
    settings = [
        ("forecast", "forecast", {"fraction": fraction}),
        ("forecast, uncorrected", "forecast", {"fraction": fraction, "correct": False}),
        ("hold", "hold", {"fraction": fraction}),
    ]
    counts, shares = [], []
    for name, policy, overrides in settings:
        values = []
        diffcache.wrap(pipe, policy, **overrides)
        for (seed, prompt), reference in zip(clips, full, strict=True):
            values.append(float(psnr(clip(pipe, prompt, seed, STEPS), reference)))
            summary = diffcache.report(pipe).summary
            counts.append(mean(summary["computed"].values()))
            shares.append(sum(summary["computed"].values()) / summary["calls"])
        diffcache.unwrap(pipe)
        print(row(name, mean(counts[-len(clips) :]), values), flush=True)
    fewer = round(STEPS * mean(shares[: len(clips)]))
    values = [
        float(psnr(clip(pipe, prompt, seed, fewer), reference))
        for (seed, prompt), reference in zip(clips, full, strict=True)
    ]
    print(row("fewer steps", fewer, values), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--schedulers", default="unipc,euler,heun,dpm")
    parser.add_argument("--fraction", type=float, default=0.4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pipe = WanPipeline.from_pretrained(demo_model_path(), torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    config = pipe.scheduler.config
    prompts = [scene.prompt for scene in held_out_scenes()[: options.prompts]]
    for name in options.schedulers.split(","):
        pipe.scheduler = SCHEDULERS[name](config)
        print(f"{name + ', ' + str(STEPS) + ' steps':22} computed     mean       p5      min")
        compare(pipe, prompts, options.fraction)


if __name__ == "__main__":
    main()

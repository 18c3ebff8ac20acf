"""Computes the tables of computed steps that diffcache ships, on the demo model.

For each solver, shift, number of steps and share of computed steps: full runs of training-like
prompts, the Gram matrix of their outputs, and the table of `schedule.fit`, scored by the PSNR of
the latents of cached runs, in which the worst clips count three times the mean: small early errors
make a clip take another path altogether. At 100 steps fewer weights are tried. Writes after each
schedule and goes on where it stopped. From the repository:

    python -m samples.tables --out diffcache/features/tables.json
"""

from __future__ import annotations

import argparse
import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline

import diffcache
from diffcache.calibrate import decibel, record
from diffcache.cli import demo_model_path
from diffcache.features.gates import computed_steps
from diffcache.features.schedule import fit
from samples.train.clips import draw_scene

CLIPS = 24
LOWEST = 3
SOLVERS = ("UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler")
SHIFTS = (2.0, 4.0, 1.0, 8.0)
STEPS = (50, 20, 10, 100)
SHARES = (0.16, 0.22, 0.3, 0.4, 0.55)
GROWTHS = (1.3, 1.6, 2.0)
ERROR_WEIGHTS = (-0.5, 0.0, 0.5, 1.0)
WARMUP, TAIL = 3, 1
NOTE = "noise levels of the computed steps; measured on diffcache's demo model (samples/tables.py)"


class Lab:
    """The demo pipeline with one batch of prompts and seeds, encoded once."""

    def __init__(self) -> None:
        self.pipe = WanPipeline.from_pretrained(demo_model_path(), torch_dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(77)
        prompts = [draw_scene(generator, pairs=0.0).prompt for _ in range(CLIPS)]
        self.embeds = self.pipe.encode_prompt(prompts, "", True, max_sequence_length=64)
        self.config = self.pipe.scheduler.config

    def arm(self, solver: str, shift: float) -> None:
        self.pipe.scheduler = (
            UniPCMultistepScheduler.from_config(self.config, flow_shift=shift)
            if solver == "UniPCMultistepScheduler"
            else FlowMatchEulerDiscreteScheduler(shift=shift)
        )

    def run(self, steps: int) -> Any:
        """Latents [CLIPS, 16, 5, 8, 8]."""
        prompt, negative = self.embeds
        return self.pipe(
            prompt_embeds=prompt,
            negative_prompt_embeds=negative,
            height=64,
            width=64,
            num_frames=17,
            num_inference_steps=steps,
            guidance_scale=2.0,
            generator=[torch.Generator().manual_seed(500 + i) for i in range(CLIPS)],
            output_type="latent",
        ).frames


def tables_at(lab: Lab, steps: int) -> dict[str, list[float]]:
    """Share -> noise levels of the computed steps, for one solver, shift and number of steps."""
    (runs,) = record(lab.pipe, [lambda: lab.run(steps)]).values()
    truth = lab.run(steps)

    def score(table: tuple[int, ...]) -> float:
        diffcache.wrap(lab.pipe, "forecast", steps=table, max_error=None)
        found = decibel(lab.run(steps), truth)
        diffcache.unwrap(lab.pipe)
        lowest = found.sort().values[:LOWEST]
        return float(found.mean() + 3 * lowest.mean()) / 4

    result = {}
    for share in SHARES:
        count = round(share * steps)
        if not WARMUP + TAIL < count < steps:
            continue
        others = [
            tuple(sorted(computed_steps(steps, share, growth, WARMUP, TAIL))) for growth in GROWTHS
        ]
        table, reached = fit(
            runs,
            count,
            score,
            error_weights=ERROR_WEIGHTS if steps <= 50 else ERROR_WEIGHTS[1:3],
            worst=(8.0,),
            others=others,
            warmup=WARMUP,
            tail=TAIL,
        )
        own = "analytic" if table in others else "searched"
        print(f"{steps} steps, {count} computed: {reached:.1f} dB, {own}, {table}", flush=True)
        result[f"{share:g}"] = [round(runs.sigmas[step], 5) for step in table]
    return result


def as_text(data: dict[str, Any]) -> str:
    """JSON with each list of numbers on one line."""
    text = json.dumps(data, indent=1)
    return re.sub(r"\[[^\[\]]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("diffcache/features/tables.json"))
    parser.add_argument("--solvers", default=",".join(SOLVERS))
    options = parser.parse_args()
    out, solvers = options.out, options.solvers.split(",")
    torch.set_num_threads(1)
    lab = Lab()
    tables: dict[str, Any] = json.loads(out.read_text())["tables"] if out.exists() else {}
    for shift, solver, steps in product(SHIFTS, solvers, STEPS):
        lengths = tables.setdefault(solver, {}).setdefault(f"{shift:g}", {})
        if str(steps) in lengths:
            continue
        print(f"{solver}, shift {shift:g}", flush=True)
        lab.arm(solver, shift)
        lengths[str(steps)] = tables_at(lab, steps)
        out.write_text(as_text({"note": NOTE, "tables": tables}))


if __name__ == "__main__":
    main()

"""Measures MagCache's curve of the demo model and writes it into diffcache/features/magcache.json.

One full run of 50 UniPC steps on the first prompt held out from training. From the repository:

    python -m samples.magnitudes
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import torch
from diffusers import WanPipeline

import diffcache.features
from diffcache.cli import demo_model_path
from diffcache.magnitudes import measure
from samples.train.clips import held_out_scenes

STEPS = 50
FILE = Path(diffcache.features.__path__[0]) / "magcache.json"
DEMO = {
    "source": "samples.magnitudes: the demo model, one clip, 50 UniPC steps",
    "steps": STEPS,
    "shift": 2.0,
    "top": 1.0,
    "bottom": 0.001,
    "timestep_scale": 1000,
    "threshold": 0.06,
    "max_skips": 3,
    "retention": 0.2,
}


def demo_ratios() -> dict[str, list[float]]:
    """Branch -> the size of each step's residual relative to that of the step before."""
    pipe = WanPipeline.from_pretrained(demo_model_path(), torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    prompt = held_out_scenes()[0].prompt

    def run() -> None:
        pipe(
            prompt,
            height=64,
            width=64,
            num_frames=17,
            num_inference_steps=STEPS,
            guidance_scale=2.0,
            generator=torch.Generator().manual_seed(0),
            max_sequence_length=64,
            output_type="latent",
        )

    policy = measure(pipe, run)["transformer"]
    return {
        branch: [1.0, *(round(after / before, 5) for before, after in pairwise(sizes))]
        for branch, _, sizes in policy.settings()["curves"]
    }


def main() -> None:
    torch.set_num_threads(1)
    known = json.loads(FILE.read_text(encoding="utf-8"))
    known["demo-wan"] = {**DEMO, "ratios": demo_ratios()}
    text = json.dumps(known, indent=1)
    in_one_line = re.sub(r"\[[^\[\]]*\]", lambda found: " ".join(found[0].split()), text)
    FILE.write_text(in_one_line.replace("[ ", "[").replace(" ]", "]") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

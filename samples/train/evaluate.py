"""Grades the exported folder: VAE round trips in dB, and what the oracle reads off generated clips.

The prompts are combinations that training never showed. Generation is the stock `WanPipeline` call.

    python -m samples.train.evaluate --count 64 --card samples/models/demo-wan-card.json
"""

import argparse
import json
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from diffusers import WanPipeline
from PIL import Image
from torch import Tensor

from samples.train.clips import Scene, draw_scene, held_out_scenes, render
from samples.train.export import DEMO, FOLDER
from samples.train.oracle import grade, read


def mean_marks(frames: Iterable[Tensor], scenes: list[Scene]) -> dict[str, float]:
    """Average of the oracle's marks over clips [17, 3, 64, 64] in [0, 1].

    `overlap` tells how clean the outlines are.
    """
    readings = [read(clip) for clip in frames]
    rows = [grade(reading, scene) for reading, scene in zip(readings, scenes, strict=True)]
    marks = {name: round(sum(row[name] for row in rows) / len(rows), 4) for name in rows[0]}
    overlaps = [reading.overlap[0] if reading.overlap else 0.0 for reading in readings]
    return {**marks, "overlap": round(sum(overlaps) / len(overlaps), 4)}


def pair_scenes(count: int) -> list[Scene]:
    """Scenes with two shapes, drawn as in training (unlike `held_out_scenes`)."""
    generator = torch.Generator().manual_seed(123)
    return [draw_scene(generator, pairs=1.0) for _ in range(count)]


@torch.no_grad()
def round_trip(pipe: WanPipeline, scenes: list[Scene]) -> dict:
    """PSNR of encode and decode, and the oracle on rendered and on decoded clips."""
    generator = torch.Generator().manual_seed(99)
    clips = torch.stack([render(scene, generator) for scene in scenes]).transpose(1, 2)
    decoded = torch.cat(
        [
            pipe.vae.decode(pipe.vae.encode(part).latent_dist.mode()).sample
            for part in clips.split(8)
        ]
    )
    psnr = -10 * (decoded - clips).div(2).square().mean(dim=(1, 2, 3, 4)).log10()
    seen, shown = ((x.transpose(1, 2) + 1) / 2 for x in (clips, decoded))
    return {
        "clips": len(scenes),
        "psnr_mean": round(float(psnr.mean()), 2),
        "psnr_min": round(float(psnr.min()), 2),
        "oracle_on_rendered": mean_marks(seen, scenes),
        "oracle_on_round_trip": mean_marks(shown, scenes),
    }


def generate(
    pipe: WanPipeline, prompts: list[str], *, steps: int, guidance: float, batch: int = 8
) -> Tensor:
    """Clips [N, 17, 3, 64, 64] in [0, 1]; prompt i gets seed i."""
    clips = []
    for first in range(0, len(prompts), batch):
        part = prompts[first : first + batch]
        seeds = [torch.Generator().manual_seed(first + i) for i in range(len(part))]
        size = {name: DEMO[name] for name in ("height", "width", "num_frames")}
        call = {
            "num_inference_steps": steps,
            "guidance_scale": guidance,
            "generator": seeds,
            "output_type": "pt",
        }
        clips.append(pipe(part, **size, **call).frames.float())
    return torch.cat(clips)


def sheet(clips: Tensor, path: Path) -> None:
    """Contact sheet: one clip per row, every fourth frame, two columns of rows."""
    rows = clips[:, ::4].permute(0, 3, 1, 4, 2).flatten(2, 3)
    rows = rows[: len(rows) // 2 * 2]
    halves = [half.flatten(0, 1) for half in rows.chunk(2)]
    pixels = torch.cat(halves, dim=1).mul(255).round().byte().numpy()
    Image.fromarray(pixels).resize((pixels.shape[1] * 2, pixels.shape[0] * 2), 0).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=16)
    parser.add_argument("--steps", type=int, default=DEMO["num_inference_steps"])
    parser.add_argument("--guidance", type=float, default=DEMO["guidance_scale"])
    parser.add_argument("--card", type=Path, help="write the numbers here")
    parser.add_argument("--sheet", type=Path, help="write a contact sheet here")
    parser.add_argument("--note", type=json.loads, default={}, help="JSON added to the card")
    args = parser.parse_args()
    torch.set_num_threads(1)
    pipe = WanPipeline.from_pretrained(args.folder)
    pipe.set_progress_bar_config(disable=True)
    single, double = held_out_scenes()[: args.count], pair_scenes(args.pairs)
    card = {
        "date": time.strftime("%Y-%m-%d"),
        "steps": args.steps,
        "guidance_scale": args.guidance,
        **args.note,
    }
    card["vae"] = round_trip(pipe, single + double)
    clips = generate(
        pipe, [s.prompt for s in single + double], steps=args.steps, guidance=args.guidance
    )
    card["held_out"] = {"prompts": len(single), "seeds": f"0..{len(single) - 1}"}
    card["held_out"] |= mean_marks(clips[: len(single)], single)
    if double:
        card["two_shapes"] = {"prompts": len(double), **mean_marks(clips[len(single) :], double)}
    print(json.dumps(card, indent=2))
    if args.card:
        args.card.write_text(json.dumps(card, indent=2) + "\n")
    if args.sheet:
        sheet(clips, args.sheet)


if __name__ == "__main__":
    main()

"""Draws and encodes clips, 256 to a file; latents are normalised as `WanPipeline` expects.

python -m samples.train.pool --vae /tmp/vae.pt --out /tmp/pool
"""

import argparse
import random
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from samples.train.clips import draw_clips
from samples.train.vae import all_frames, build, encode

SHARD = 256


def load_vae(path: Path) -> AutoencoderKLWan:
    """The VAE from a checkpoint of `vae.py`, for use without gradients."""
    state = torch.load(path)
    vae = all_frames(build()).eval().requires_grad_(False)
    vae.load_state_dict(state["weights"])
    return vae


@torch.no_grad()
def measure(vae: AutoencoderKLWan, clips: int = 256) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [16] of the latents."""
    latents = torch.cat(
        [encode(vae, draw_clips(32, 5 * 10**8 + i)[0])[0] for i in range(clips // 32)]
    )
    return latents.mean(dim=(0, 2, 3, 4)), latents.std(dim=(0, 2, 3, 4))


def statistics(vae: AutoencoderKLWan, path: Path) -> tuple[Tensor, Tensor]:
    """Measured once, then read from `path`."""
    if not path.exists():
        torch.save(measure(vae), path)
    mean, std = torch.load(path)
    return mean.view(1, 16, 1, 1, 1), std.view(1, 16, 1, 1, 1)


class Pool:
    """Encoded clips from the files that `pool.py` writes; new files are noticed on the way."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.known = folder, set()
        self.latents: list[Tensor] = []
        self.prompts: list[str] = []

    def refresh(self) -> None:
        for path in sorted(self.folder.glob("*.pt")):
            if path not in self.known:
                shard = torch.load(path)
                self.known.add(path)
                self.latents.extend(shard["latents"])
                self.prompts.extend(shard["prompts"])

    def draw(self, count: int) -> tuple[Tensor, list[str]]:
        """Latents [count, 16, 5, 8, 8] and prompts, one in ten of them empty."""
        rows = random.sample(range(len(self.prompts)), count)
        prompts = ["" if random.random() < 0.1 else self.prompts[i] for i in rows]
        return torch.stack([self.latents[i] for i in rows]).float(), prompts


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vae", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--files", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    vae = load_vae(args.vae)
    mean, std = statistics(vae, args.vae.with_suffix(".stats"))
    for number in range(args.first, args.first + args.files):
        path = args.out / f"{number:05d}.pt"
        if path.exists():
            continue
        clips, prompts = draw_clips(SHARD, 10**9 + number)
        latents = torch.cat([encode(vae, part)[0] for part in clips.split(32)])
        torch.save(
            {"latents": ((latents - mean) / std).half(), "prompts": prompts},
            path.with_suffix(".tmp"),
        )
        path.with_suffix(".tmp").rename(path)


if __name__ == "__main__":
    main()

"""Trains the demo `AutoencoderKLWan`: 17x64x64 clips to latents 16x5x8x8.

The stock class works frame by frame with a cache and clamps its output. Training runs all frames at
once, unclamped; `all_frames` makes the two agree to rounding.

    torchrun --nproc-per-node 2 -m samples.train.vae --out /tmp/vae.pt --minutes 30
"""

import argparse
import time
from pathlib import Path
from types import MethodType

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample, patchify, unpatchify
from torch import Tensor

from samples.train.clips import draw_clips
from samples.train.optim import Average, Mixed, average_gradients, join_group, log, schedule

LOGS = Path(__file__).parent / "logs"


def build() -> AutoencoderKLWan:
    """The untrained VAE; pixels are folded 2x2 into channels before the first layer."""
    return AutoencoderKLWan(
        base_dim=16,
        decoder_base_dim=24,
        z_dim=16,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=8,
        scale_factor_temporal=4,
    )


def resample(
    self: WanResample, x: Tensor, feat_cache: None = None, feat_idx: None = None
) -> Tensor:
    """`WanResample.forward` for all frames at once: the first frame skips the time convolution.

    x: [B, C, T, H, W]
    """
    if self.mode == "upsample3d" and x.shape[2] > 1:
        pairs = self.time_conv(x[:, :, 1:]).unflatten(1, (2, -1))
        x = torch.cat([x[:, :, :1], pairs.permute(0, 2, 3, 1, 4, 5).flatten(2, 3)], dim=2)
    frames = x.shape[2]
    x = self.resample(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (-1, frames)).transpose(1, 2)
    if self.mode == "downsample3d" and frames > 1:
        x = torch.cat([x[:, :, :1], self.time_conv(x)], dim=2)
    return x


def all_frames(vae: AutoencoderKLWan) -> AutoencoderKLWan:
    """Put `resample` on this instance, so that `encode` and `decode` below need no frame loop."""
    for module in vae.modules():
        if isinstance(module, WanResample):
            module.forward = MethodType(resample, module)
    return vae


def encode(vae: AutoencoderKLWan, clips: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log variance, each [B, 16, 5, 8, 8], of clips [B, 3, 17, 64, 64]."""
    mean, logvar = vae.quant_conv(vae.encoder(patchify(clips, 2))).float().chunk(2, dim=1)
    return mean, logvar.clamp(-30, 20)


def decode(vae: AutoencoderKLWan, latents: Tensor) -> Tensor:
    """Unclamped clips [B, 3, 17, 64, 64]."""
    return unpatchify(vae.decoder(vae.post_quant_conv(latents), first_chunk=True), 2).float()


def losses(vae: AutoencoderKLWan, clips: Tensor, kl_weight: float) -> tuple[Tensor, Tensor]:
    """Training loss, and the squared error of the pixels."""
    with torch.autocast("cpu", torch.bfloat16):
        mean, logvar = encode(vae, clips)
        output = decode(vae, mean + torch.randn_like(mean) * (0.5 * logvar).exp())
    error = output - clips
    edges = sum((error.diff(dim=d)).abs().mean() for d in (-1, -2))
    kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    square = error.square().mean()
    return F.smooth_l1_loss(
        output, clips, beta=0.05
    ) + 2 * square + 0.5 * edges + kl_weight * kl, square


def split(vae: AutoencoderKLWan) -> tuple[list[Tensor], list[Tensor]]:
    """Inner weights for Muon; gains, biases, first and last layers for AdamW."""
    ends = ("encoder.conv_in", "decoder.conv_out", "quant_conv", "post_quant_conv")
    named = [(name, w) for name, w in vae.named_parameters() if w.requires_grad]
    inner = [w for n, w in named if n.endswith("weight") and w.ndim > 1 and not n.startswith(ends)]
    chosen = {id(w) for w in inner}
    return inner, [w for _, w in named if id(w) not in chosen]


def train(args: argparse.Namespace) -> None:
    rank, world = join_group()
    torch.manual_seed(0)
    vae = all_frames(build())
    if args.out.exists():
        vae.load_state_dict(torch.load(args.out)["weights"])
    if args.decoder_only:
        vae.encoder.requires_grad_(False)
        vae.quant_conv.requires_grad_(False)
    optimizer = Mixed(*split(vae), muon=args.muon, adam=args.adam)
    average = Average(vae, 0.998)
    parameters = [w for w in vae.parameters() if w.requires_grad]
    start, step, saved, recent = time.time(), 0, 0.0, []
    elapsed, total = 0.0, args.minutes * 60
    torch.manual_seed(args.seed * world + rank)
    while elapsed < total:
        clips, _ = draw_clips(args.batch, args.seed * 10**8 + step * world + rank)
        if elapsed < args.still * total:
            clips = clips[:, :, ::4].transpose(1, 2).reshape(-1, 3, 1, 64, 64)
        loss, square = losses(vae, clips, args.kl)
        loss.backward()
        elapsed = average_gradients(parameters, time.time() - start)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step(schedule(elapsed, total, step=step))
        average.update(vae)
        recent.append(float(square.detach()))
        step += 1
        if rank == 0 and step % 50 == 0:
            psnr = -10 * torch.tensor(recent).mean().div(4).log10()
            log(args.log, start, step=step, loss=round(loss.item(), 4), psnr=round(float(psnr), 2))
            recent = []
        if rank == 0 and (elapsed - saved > 120 or elapsed >= total):
            torch.save({"weights": average.weights, "step": step}, args.out.with_suffix(".tmp"))
            args.out.with_suffix(".tmp").rename(args.out)
            saved = elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="averaged weights; training goes on from them"
    )
    parser.add_argument("--log", type=Path, default=LOGS / "vae.jsonl")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--batch", type=int, default=4, help="clips per process and step")
    parser.add_argument(
        "--still", type=float, default=0.12, help="share of the time spent on single frames"
    )
    parser.add_argument("--muon", type=float, default=5e-3)
    parser.add_argument("--adam", type=float, default=2e-3)
    parser.add_argument("--kl", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--decoder-only", action="store_true", help="leave the latents as they are")
    torch.set_num_threads(1)
    train(parser.parse_args())


if __name__ == "__main__":
    main()

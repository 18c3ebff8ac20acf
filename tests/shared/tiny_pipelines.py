"""Random pipelines of the stock classes that take an image, a video or both passes in one batch."""

from __future__ import annotations

from typing import Any

import torch
from toys import TEXT_DIM, TINY_WAN, fill_zeros, start

# 4 latent channels, 8 pixels and 4 frames to a latent, as the real one has.
TINY_VAE = {
    "base_dim": 4,
    "z_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.0] * 4,
    "latents_std": [1.0] * 4,
}


def _seeded(seed: int, make: Any, **config: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return fill_zeros(make(**config))


def _parts() -> dict[str, Any]:
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler

    return {
        "tokenizer": None,
        "text_encoder": None,
        "vae": _seeded(0, AutoencoderKLWan, **TINY_VAE),
        "scheduler": UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.0
        ),
    }


def image_to_video(seed: int = 0) -> Any:
    """A WanImageToVideoPipeline without image encoder: 4 noise, 4 mask and 4 image channels."""
    from diffusers import WanImageToVideoPipeline, WanTransformer3DModel

    wan = _seeded(seed, WanTransformer3DModel, **{**TINY_WAN, "in_channels": 12})
    return _quiet(WanImageToVideoPipeline(transformer=wan, **_parts()))


def vace(seed: int = 0) -> Any:
    """A WanVACEPipeline: four blocks, hints after the first and the third that move the clip."""
    from diffusers import WanVACEPipeline, WanVACETransformer3DModel

    config = {**TINY_WAN, "num_layers": 4, "vace_layers": [0, 2], "vace_in_channels": 8 + 64}
    wan = _seeded(seed, WanVACETransformer3DModel, **config)
    # A random codec makes nearly the same latents of all pictures.
    wan.vace_patch_embedding.weight.data.mul_(30)
    return _quiet(WanVACEPipeline(transformer=wan, **_parts()))


def video_to_video(seed: int = 0) -> Any:
    """A WanVideoToVideoPipeline: begins in the middle of its schedule."""
    from diffusers import WanTransformer3DModel, WanVideoToVideoPipeline

    wan = _seeded(seed, WanTransformer3DModel, **TINY_WAN)
    return _quiet(WanVideoToVideoPipeline(transformer=wan, **_parts()))


def two_experts(first: bool = True, second: bool = True, boundary: float | None = 0.7) -> Any:
    """A WanPipeline as Wan 2.2 has it: of 24 steps about half go to each expert."""
    from diffusers import WanPipeline, WanTransformer3DModel

    experts = [_seeded(seed, WanTransformer3DModel, **TINY_WAN) for seed in (0, 1)]
    return _quiet(
        WanPipeline(
            **{**_parts(), "vae": None},
            transformer=experts[0] if first else None,
            transformer_2=experts[1] if second else None,
            boundary_ratio=boundary,
        )
    )


def batched_guidance(seed: int = 0) -> Any:
    """An LTXPipeline: both guidance passes go through the model as one batch."""
    from diffusers import FlowMatchEulerDiscreteScheduler, LTXPipeline, LTXVideoTransformer3DModel

    ltx = _seeded(
        seed,
        LTXVideoTransformer3DModel,
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        num_layers=3,
        caption_channels=TEXT_DIM,
    )
    parts = {"tokenizer": None, "text_encoder": None, "vae": None}
    return _quiet(
        LTXPipeline(transformer=ltx, scheduler=FlowMatchEulerDiscreteScheduler(), **parts)
    )


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def embeddings(seed: int = 0, batch: int = 1) -> dict[str, torch.Tensor]:
    """Seeded embeddings of a prompt and a negative prompt."""
    return {
        "prompt_embeds": start(batch, 6, TEXT_DIM, seed=seed),
        "negative_prompt_embeds": start(batch, 6, TEXT_DIM, seed=seed + 1000),
    }

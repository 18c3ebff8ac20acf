"""Shared fixtures: tiny pipelines made from a config, nothing downloaded, one thread."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from toys import TEXT_DIM, TINY_WAN

if TYPE_CHECKING:
    from diffusers import WanPipeline

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Sums then add up in one order, so equal runs are bit-identical."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    return ROOT


@pytest.fixture
def tiny_wan() -> Callable[..., WanPipeline]:
    """Makes a random WanPipeline without text encoder and VAE; equal seeds give twins.

    Arguments of the factory: seed, and any setting of WanTransformer3DModel.
    """
    return _tiny_wan


def _tiny_wan(seed: int = 0, **config: Any) -> WanPipeline:
    from diffusers import UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformer = WanTransformer3DModel(**{**TINY_WAN, **config}).eval()
        for parameter in transformer.parameters():
            if not parameter.any():  # zero biases would let conditioning and time go unnoticed
                torch.nn.init.normal_(parameter, std=0.1)
    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.0
    )
    pipe = WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=scheduler, transformer=transformer
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def run_tiny() -> Callable[..., torch.Tensor]:
    """Runs a `tiny_wan` pipeline from seeded noise and conditioning.

    Arguments: pipe, steps, guidance (1 runs one branch), seed, batch, frames and size
    (of the latents), and any argument of the pipeline's call.

    Returns:
        Latents, [batch, 4, frames, size, size].
    """
    return _run_tiny


def _run_tiny(
    pipe: WanPipeline,
    *,
    steps: int = 12,
    guidance: float = 5.0,
    seed: int = 0,
    batch: int = 1,
    frames: int = 2,
    size: int = 8,
    **call: Any,
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    channels = pipe.transformer.config.in_channels

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=generator)

    inputs: dict[str, Any] = {
        "prompt_embeds": noise(6, TEXT_DIM),
        "negative_prompt_embeds": noise(6, TEXT_DIM),
        "latents": noise(channels, frames, size, size),
    }
    return pipe(
        height=size * 8,
        width=size * 8,
        num_frames=(frames - 1) * 4 + 1,
        num_inference_steps=steps,
        guidance_scale=guidance,
        output_type="latent",
        **{**inputs, **call},
    ).frames


@pytest.fixture(scope="session")
def _loaded_demo_pipe() -> WanPipeline:
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(
        ROOT / "samples" / "models" / "demo-wan", torch_dtype=torch.float32, local_files_only=True
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def demo_pipe(_loaded_demo_pipe: WanPipeline) -> Callable[[], WanPipeline]:
    """Makes copies of the trained demo pipeline (samples/models/demo-wan) in fp32."""
    return lambda: copy.deepcopy(_loaded_demo_pipe)

"""`diffcache run` on a pipeline that makes images, takes no frames and knows no step callback."""

import numpy as np
import pytest
import torch
from PIL import Image

from diffcache.cli.loading import load_pipeline

SIZE = ("--height", "64", "--width", "64", "--steps", "12")


@pytest.fixture(scope="module")
def tiny_image(tiny_demo, tmp_path_factory):
    """The folder of a random PixArt pipeline; text parts are those of the tiny demo."""
    from diffusers import (
        AutoencoderKL,
        DPMSolverMultistepScheduler,
        PixArtAlphaPipeline,
        PixArtTransformer2DModel,
    )

    text = load_pipeline(tiny_demo, device="cpu")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipe = PixArtAlphaPipeline(
            tokenizer=text.tokenizer,
            text_encoder=text.text_encoder,
            vae=AutoencoderKL(
                block_out_channels=(8, 8, 8, 8),
                norm_num_groups=4,
                latent_channels=4,
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
            ),
            transformer=PixArtTransformer2DModel(
                sample_size=32,
                num_layers=2,
                attention_head_dim=8,
                num_attention_heads=2,
                caption_channels=16,
                cross_attention_dim=16,
                use_additional_conditions=False,
            ),
            scheduler=DPMSolverMultistepScheduler(),
        )
    folder = tmp_path_factory.mktemp("models") / "tiny-pixart"
    pipe.save_pretrained(folder)
    return folder


def test_an_image_for_each_prompt_and_a_comparison(diffcache, tiny_image, tmp_path):
    page = tmp_path / "page.html"
    ran = diffcache(
        *("run", tiny_image, "a red circle", *SIZE, "--seed", "4", "--compare", "--json"),
        *("--out", tmp_path, "--report", page),
    )
    assert ran.code == 0, ran.err
    figures = ran.json()
    clip = figures["clips"][0]
    assert figures["pipeline"] == "PixArtAlphaPipeline" and figures["fps"] is None
    assert (clip["frames"], clip["height"], clip["width"]) == (1, 64, 64)
    assert 0 < clip["computed"] < 12 and 0 < clip["seconds"] < clip["seconds_total"]
    stock = load_pipeline(tiny_image, device="cpu")
    image = stock(
        "a red circle",
        height=64,
        width=64,
        num_inference_steps=12,
        generator=torch.Generator().manual_seed(4),
    ).images[0]
    assert (np.asarray(Image.open(clip["path_uncached"])) == np.asarray(image)).all()
    assert Image.open(clip["path"]).size == (64, 64)
    text = page.read_text(encoding="utf-8")
    assert "<video" not in text and "data:image/png" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--frames", "5"), "PixArtAlphaPipeline takes no --frames"),
        (("--format", "gif"), "makes images, not gif"),
        (("--out", "x.mp4"), "makes images, not mp4"),
    ],
)
def test_what_is_for_videos_only_is_refused(
    arguments, says, diffcache, tiny_image, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    ran = diffcache("run", tiny_image, "a", *arguments)
    assert ran.code == 2 and says in ran.err and ran.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []

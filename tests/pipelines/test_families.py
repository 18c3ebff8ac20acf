"""Which published model a denoiser is taken for, by the configs that the checkpoints have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

import diffcache
from diffcache.features.published import _names
from diffcache.pipelines.families import family

WAN = {"num_layers": 30, "num_attention_heads": 12, "attention_head_dim": 128, "in_channels": 16}
WAN |= {"text_dim": 4096, "image_dim": None}
BIG = {**WAN, "num_layers": 40, "num_attention_heads": 40}
IMAGE = {**BIG, "in_channels": 36, "image_dim": 1280}
FIVE = {**WAN, "num_attention_heads": 24, "in_channels": 48}
FLUX = {"num_layers": 19, "num_single_layers": 38, "in_channels": 64, "guidance_embeds": True}
HUNYUAN = {"num_layers": 20, "num_single_layers": 40, "in_channels": 16}
COG = {"num_layers": 42, "num_attention_heads": 48, "patch_size_t": 2, "in_channels": 16}


def module(cls, config):
    made = type(f"{cls}Transformer3DModel" if "Flux" not in cls else cls, (nn.Module,), {})()
    made.config = config
    return made


def pipeline(cls="WanPipeline", boundary=None):
    return type(cls, (), {"config": SimpleNamespace(boundary_ratio=boundary)})()


def at(path, config):
    return {**config, "_name_or_path": path}


@pytest.mark.parametrize(
    ("cls", "config", "pipe", "expected"),
    [
        ("Wan", WAN, None, "wan2.1-t2v-1.3b"),
        ("Wan", WAN, pipeline(), "wan2.1-t2v-1.3b"),
        ("Wan", BIG, pipeline(), "wan2.1-t2v-14b"),
        ("Wan", at("Wan-AI/Wan2.1-T2V-14B-Diffusers", BIG), None, "wan2.1-t2v-14b"),
        ("Wan", at("x/Wan2.1-I2V-14B-480P", IMAGE), pipeline(), "wan2.1-i2v-14b-480p"),
        ("Wan", at("x/Wan2.1-I2V-14B-720P", IMAGE), pipeline(), "wan2.1-i2v-14b-720p"),
        ("Wan", BIG, pipeline(boundary=0.875), "wan2.2-t2v-a14b/transformer"),
        (
            "Wan",
            {**IMAGE, "image_dim": None},
            pipeline("WanImageToVideoPipeline", 0.9),
            "wan2.2-i2v-a14b/transformer",
        ),
        ("Wan", FIVE, pipeline(), "wan2.2-ti2v-5b"),
        ("Wan", FIVE, pipeline("WanImageToVideoPipeline"), "wan2.2-ti2v-5b-image"),
        ("WanVACE", {**WAN}, None, "wan2.1-vace-1.3b"),
        ("FluxTransformer2DModel", FLUX, pipeline("FluxPipeline"), "flux.1-dev"),
        ("HunyuanVideo", HUNYUAN, None, "hunyuanvideo"),
        ("LTXVideo", {"num_layers": 28, "in_channels": 128}, None, "ltx-video-2b"),
        ("Mochi", {"num_layers": 48, "num_attention_heads": 24}, None, "mochi-1"),
        ("CogVideoX", COG, None, "cogvideox1.5-5b"),
        ("CogVideoX", {**COG, "in_channels": 32}, None, "cogvideox1.5-5b-image"),
        ("CogVideoX", {**COG, "patch_size_t": None}, None, "cogvideox-5b"),
        (
            "CogVideoX",
            {"num_layers": 30, "num_attention_heads": 30},
            None,
            "cogvideox-2b",
        ),
    ],
)
def test_known_models(cls, config, pipe, expected):
    """Each name is one that something was published for."""
    assert family(module(cls, config), pipe) == expected
    assert expected in _names()


def test_every_published_model_can_be_found():
    """No entry of the data that no model is taken for (the experts' second halves apart)."""
    params = test_known_models.pytestmark[0].args[1]
    found = {expected for *_, expected in params} | {"demo-wan"}
    assert {name for name in _names() if not name.endswith("_2")} == found


@pytest.mark.parametrize(
    ("cls", "config", "pipe"),
    [
        ("Wan", BIG, None),  # 2.1's or an expert of 2.2
        ("Wan", at("Wan-AI/Wan2.2-T2V-A14B-Diffusers", BIG), None),
        ("Wan", IMAGE, pipeline()),  # 480P or 720P
        ("Wan", {**WAN, "in_channels": 36}, pipeline()),  # a 1.3B with an image: Fun models
        ("Wan", {**WAN, "num_layers": 3}, pipeline()),
        ("WanVACE", BIG, None),
        ("FluxTransformer2DModel", FLUX, pipeline("FluxKontextPipeline")),
        ("FluxTransformer2DModel", {**FLUX, "guidance_embeds": False}, None),  # schnell
        ("HunyuanVideo", {**HUNYUAN, "in_channels": 33}, None),  # image-to-video
        ("LTXVideo", {"num_layers": 48, "in_channels": 128}, None),  # 13B
        ("CogVideoX", {**COG, "num_layers": 2}, None),
        ("SomethingElse", WAN, None),
    ],
)
def test_others_are_taken_for_none(cls, config, pipe):
    """Not for the nearest one."""
    assert family(module(cls, config), pipe) == ""


def test_experts_are_told_apart():
    """By their place in the pipeline: nothing else differs."""
    found = family(module("Wan", BIG), pipeline(boundary=0.875), "transformer_2")
    assert found == "wan2.2-t2v-a14b/transformer_2"


def test_modules_without_a_config():
    """Own classes that carry a known name, or no config."""
    assert (
        family(nn.Linear(2, 2)) == ""
        and family(type("WanTransformer3DModel", (nn.Module,), {})()) == ""
    )


def test_the_demo_model(demo_pipe):
    """By its sizes, through wrap; a tiny random one is none."""
    pipe = diffcache.wrap(demo_pipe(), "teacache")
    assert pipe.transformer.__dict__["_diffcache"].policy.gate.model == "demo-wan"


def test_a_random_model_is_none(tiny_wan):
    """And its policy says so."""
    pipe = diffcache.wrap(tiny_wan(), "teacache")
    assert pipe.transformer.__dict__["_diffcache"].policy.gate.model == ""

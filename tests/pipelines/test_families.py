"""Which published model a denoiser is taken for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

import diffcache
from diffcache.features.published import _entries
from diffcache.pipelines.families import family

SMALL = {"num_layers": 30, "num_attention_heads": 12, "attention_head_dim": 128}
LARGE = {"num_layers": 40, "num_attention_heads": 40, "attention_head_dim": 128}
FIVE = {"num_layers": 30, "num_attention_heads": 24, "attention_head_dim": 128}
FLUX = {"num_layers": 19, "num_single_layers": 38, "in_channels": 64, "guidance_embeds": True}
COG = {"num_layers": 42, "num_attention_heads": 48, "in_channels": 16}
PLACE = "Wan-AI/Wan2.1-I2V-14B-{}-Diffusers"


def denoiser(name, **config):
    module = type(name, (nn.Module,), {})()
    module.config = {"text_dim": 4096, "_name_or_path": "", **config}
    return module


def wan(sizes, channels=16, **config):
    return denoiser("WanTransformer3DModel", in_channels=channels, **sizes, **config)


def pipeline(kind="WanPipeline", boundary=None):
    return type(kind, (), {})() if boundary is None else two_experts(kind, boundary)


def two_experts(kind, boundary):
    made = type(kind, (), {})()
    made.config = SimpleNamespace(boundary_ratio=boundary)
    return made


IMAGE = {"channels": 36, "image_dim": 1280}
CASES = [
    (wan(SMALL), pipeline(), "wan2.1-t2v-1.3b"),
    (wan(SMALL), None, "wan2.1-t2v-1.3b"),
    (wan(LARGE), pipeline(), "wan2.1-t2v-14b"),
    (wan(LARGE, **IMAGE, _name_or_path=PLACE.format("480P")), pipeline(), "wan2.1-i2v-14b-480p"),
    (wan(LARGE, **IMAGE, _name_or_path=PLACE.format("720P")), pipeline(), "wan2.1-i2v-14b-720p"),
    (wan(LARGE, **IMAGE), pipeline(), ""),
    (wan(LARGE), None, ""),
    (wan(LARGE), pipeline(boundary=0.875), "wan2.2-t2v-a14b/transformer"),
    (wan(LARGE, channels=36), pipeline(boundary=0.9), "wan2.2-i2v-a14b/transformer"),
    (wan(FIVE, channels=48), pipeline(), "wan2.2-ti2v-5b"),
    (wan(FIVE, channels=48), pipeline("WanImageToVideoPipeline"), "wan2.2-ti2v-5b-image"),
    (wan({**SMALL, "num_layers": 3}), pipeline(), ""),
    (denoiser("FluxTransformer2DModel", **FLUX), pipeline("FluxPipeline"), "flux.1-dev"),
    (denoiser("FluxTransformer2DModel", **{**FLUX, "guidance_embeds": False}), None, ""),
    (denoiser("FluxTransformer2DModel", **FLUX), pipeline("FluxKontextPipeline"), ""),
    (denoiser("CogVideoXTransformer3DModel", **COG), None, "cogvideox-5b"),
    (denoiser("CogVideoXTransformer3DModel", **COG, patch_size_t=2), None, "cogvideox1.5-5b"),
    (denoiser("Unheard", **SMALL), pipeline(), ""),
]


@pytest.mark.parametrize(("module", "pipe", "expected"), CASES)
def test_family(module, pipe, expected):
    """By class and sizes; what they leave open stays unknown, so nothing foreign is used."""
    assert family(module, pipe) == expected
    assert not expected or expected in {**_entries("magcache"), **_entries("teacache")}


def test_second_expert_and_compiled():
    """The name in the pipeline tells the experts apart; a compile wrapper is looked through."""
    assert family(wan(LARGE), pipeline(boundary=0.875), "transformer_2").endswith("/transformer_2")
    covered = nn.Module()
    covered._orig_mod = wan(SMALL)
    assert family(covered) == "wan2.1-t2v-1.3b"


def test_modules_without_a_config(tiny_wan):
    """Own modules and tiny ones are nobody."""
    assert family(nn.Linear(2, 2)) == "" and family(tiny_wan().transformer) == ""


def test_wrap_finds_the_model_and_unwrap_leaves_no_trace(tiny_wan):
    """A model named outright wins over what wrap finds."""
    pipe = tiny_wan()
    before = dict(pipe.transformer.__dict__)
    diffcache.wrap(pipe, "magcache", model="wan2.1-t2v-14b")
    policy = pipe.transformer._diffcache.policy
    assert policy.gate.model == "wan2.1-t2v-14b"
    diffcache.wrap(pipe, "teacache")
    assert pipe.transformer._diffcache.policy.gate.model == ""
    diffcache.unwrap(pipe)
    assert pipe.transformer.__dict__.keys() == before.keys()

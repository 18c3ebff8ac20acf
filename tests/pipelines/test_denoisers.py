"""Which components of a pipeline are denoisers."""

from __future__ import annotations

from types import SimpleNamespace

import diffusers
import pytest
import torch
from torch import nn

from diffcache.pipelines.denoisers import denoisers, is_pipeline, served_timesteps, takes_timestep


class Timed(nn.Module):
    """Called with a timestep."""

    def forward(self, hidden_states, timestep):
        return hidden_states


class Untimed(nn.Module):
    """A text encoder or a VAE."""

    def forward(self, hidden_states):
        return hidden_states


def pipeline(**components):
    return SimpleNamespace(components=components)


def test_a_real_pipeline(tiny_wan):
    """Wan: the transformer alone; no second one where none is loaded."""
    pipe = tiny_wan()
    assert denoisers(pipe) == {"transformer": pipe.transformer} and is_pipeline(pipe)


def test_two_experts():
    """Wan 2.2 has two, in the pipeline's order."""
    one, two = Timed(), Timed()
    found = denoisers(pipeline(transformer=one, scheduler=object(), transformer_2=two))
    assert list(found.items()) == [("transformer", one), ("transformer_2", two)]


def test_missing_and_other_components():
    """None, schedulers, tokenizers, encoders and VAEs are no denoisers."""
    found = denoisers(
        pipeline(
            transformer=Timed(),
            transformer_2=None,
            vae=Untimed(),
            text_encoder=Untimed(),
            tokenizer=object(),
            feature_extractor=lambda: None,
        )
    )
    assert list(found) == ["transformer"]


@pytest.mark.parametrize(
    "name", ["controlnet", "t2i_adapter", "image_encoder", "text_encoder_2", "vae"]
)
def test_helpers_with_a_timestep(name):
    """ControlNets are called with a timestep too, but they only feed the denoiser."""
    found = denoisers(pipeline(**{name: Timed(), "unet": Timed()}))
    assert list(found) == ["unet"]


def test_without_a_denoiser():
    """A pipeline of helpers has none."""
    assert denoisers(pipeline(vae=Untimed(), scheduler=object())) == {}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (Timed(), False),
        (object(), False),
        (SimpleNamespace(components=[1]), False),
        (SimpleNamespace(components={}), True),
    ],
)
def test_is_pipeline(target, expected):
    """Named components make a pipeline; a module never is one."""
    assert is_pipeline(target) is expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("WanTransformer3DModel", True),
        ("HunyuanVideoTransformer3DModel", True),
        ("LTXVideoTransformer3DModel", True),
        ("CogVideoXTransformer3DModel", True),
        ("MochiTransformer3DModel", True),
        ("FluxTransformer2DModel", True),
        ("ZImageTransformer2DModel", True),
        ("Lumina2Transformer2DModel", True),
        ("UNet2DConditionModel", True),
        ("UNetSpatioTemporalConditionModel", True),
        ("AutoencoderKLWan", False),
    ],
)
def test_stock_classes(name, expected):
    """By signature alone, so no class is named in our code."""
    cls = getattr(diffusers, name)
    assert takes_timestep(cls.__new__(cls)) is expected if _plain(cls) else True
    assert any(p in _names(cls) for p in ("timestep", "t")) is expected


def _plain(cls):
    """Whether an instance without __init__ can be asked."""
    try:
        nn.Module.__init__(cls.__new__(cls))
    except (AttributeError, TypeError):
        return False
    return not hasattr(cls, "__slots__")


def _names(cls):
    import inspect

    return inspect.signature(cls.forward).parameters


def test_below_torch_compile():
    """The wrapper of torch.compile is seen through."""
    assert takes_timestep(torch.compile(Timed(), backend="eager"))
    assert not takes_timestep(torch.compile(Untimed(), backend="eager"))


def test_experts_share_the_timesteps():
    """Wan 2.2: noisy steps at or above the boundary go to the first, the rest to the second."""
    pipe = pipeline()
    pipe.config = SimpleNamespace(boundary_ratio=0.875)
    pipe.scheduler = SimpleNamespace(config=SimpleNamespace(num_train_timesteps=1000))
    high, low = (served_timesteps(pipe, name) for name in ("transformer", "transformer_2"))
    for timestep in (999.0, 875.0, 874.9, 0.0):
        assert high(timestep) == (timestep >= 875) and low(timestep) == (timestep < 875)


def test_one_expert_serves_all(tiny_wan):
    """Without a boundary, or for other components, nothing is shared."""
    assert served_timesteps(tiny_wan(), "transformer") is None
    assert served_timesteps(pipeline(), "unet") is None

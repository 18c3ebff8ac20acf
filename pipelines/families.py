"""Tells which published model a denoiser is, by its class, its sizes and its pipeline.

Names are those of `features/teacache.json` and `features/magcache.json`. A fine-tune has the sizes
of its base and is taken for it. Where checkpoints of one shape were measured apart (Wan 2.1's two
image-to-video models) the path that it was loaded from decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

Config = Mapping[str, Any]


def family(module: nn.Module, pipeline: Any = None, name: str = "transformer") -> str:
    """The name of the model, or "" where it is none that is known.

    Args:
        module: a denoiser (under `torch.compile` too).
        pipeline: the pipeline that it belongs to, None for a module by itself.
        name: its name there; Wan 2.2's experts differ in nothing else.
    """
    inner = getattr(module, "_orig_mod", module)
    config = getattr(inner, "config", None)
    find = FAMILIES.get(type(inner).__name__)
    if find is None or not isinstance(config, Mapping):
        return ""
    return find(config, pipeline, name)


def _wan(config: Config, pipeline: Any, name: str) -> str:
    size = (config["num_layers"], config["num_attention_heads"], config["attention_head_dim"])
    channels = config["in_channels"]
    if size == (12, 4, 32) and config["text_dim"] == 64:
        return "demo-wan"
    if size == (30, 24, 128) and channels == 48:
        return "wan2.2-ti2v-5b-image" if _to_video(pipeline) else "wan2.2-ti2v-5b"
    if size == (30, 12, 128) and channels == 16:
        return "wan2.1-t2v-1.3b"
    if size == (40, 40, 128):
        return _wan_14b(config, pipeline, name)
    return ""


def _wan_14b(config: Config, pipeline: Any, name: str) -> str:
    path = str(config.get("_name_or_path", "")).lower()
    two = getattr(getattr(pipeline, "config", None), "boundary_ratio", None) is not None
    takes_image = config["in_channels"] == 36
    if two:
        return f"wan2.2-{'i2v' if takes_image else 't2v'}-a14b/{name}"
    if "wan2.2" in path or (pipeline is None and "wan2.1" not in path):
        return ""  # an expert by itself does not tell which it is
    if not takes_image:
        return "wan2.1-t2v-14b" if config["in_channels"] == 16 else ""
    resolution = next((word for word in ("480p", "720p") if word in path), None)
    known = resolution and config.get("image_dim") is not None
    return f"wan2.1-i2v-14b-{resolution}" if known else ""


def _wan_vace(config: Config, pipeline: Any, name: str) -> str:
    small = (config["num_layers"], config["num_attention_heads"]) == (30, 12)
    return "wan2.1-vace-1.3b" if small and config["attention_head_dim"] == 128 else ""


def _flux(config: Config, pipeline: Any, name: str) -> str:
    plain = type(pipeline).__name__ in ("FluxPipeline", "FluxImg2ImgPipeline", "NoneType")
    size = (config["num_layers"], config["num_single_layers"], config["in_channels"])
    dev = config["guidance_embeds"] and size == (19, 38, 64)
    kontext = "kontext" in str(config.get("_name_or_path", "")).lower()
    return "flux.1-dev" if plain and dev and not kontext else ""


def _hunyuan(config: Config, pipeline: Any, name: str) -> str:
    size = (config["num_layers"], config["num_single_layers"], config["in_channels"])
    return "hunyuanvideo" if size == (20, 40, 16) else ""


def _ltx(config: Config, pipeline: Any, name: str) -> str:
    return "ltx-video-2b" if (config["num_layers"], config["in_channels"]) == (28, 128) else ""


def _mochi(config: Config, pipeline: Any, name: str) -> str:
    return "mochi-1" if (config["num_layers"], config["num_attention_heads"]) == (48, 24) else ""


def _cogvideox(config: Config, pipeline: Any, name: str) -> str:
    layers, heads = config["num_layers"], config["num_attention_heads"]
    newer = config.get("patch_size_t") is not None
    if (layers, heads, newer) == (30, 30, False):
        return "cogvideox-2b"
    if (layers, heads) != (42, 48):
        return ""
    if not newer:
        return "cogvideox-5b"
    return "cogvideox1.5-5b-image" if config["in_channels"] == 32 else "cogvideox1.5-5b"


def _to_video(pipeline: Any) -> bool:
    return "ImageToVideo" in type(pipeline).__name__


FAMILIES: Mapping[str, Callable[[Config, Any, str], str]] = {
    "WanTransformer3DModel": _wan,
    "WanVACETransformer3DModel": _wan_vace,
    "FluxTransformer2DModel": _flux,
    "HunyuanVideoTransformer3DModel": _hunyuan,
    "LTXVideoTransformer3DModel": _ltx,
    "MochiTransformer3DModel": _mochi,
    "CogVideoXTransformer3DModel": _cogvideox,
}

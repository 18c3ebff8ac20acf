"""Runs one forward on the meta device and watches the blocks: shapes only, no weights."""

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..blocks import BlockList, Contract, Observer, find_block_lists, tensors_of
from ..signature import TIMESTEP_NAMES
from ..spans import shimmed
from .inspect_target import Source

TEXT_TOKENS = 512
TEXT_WIDTHS = (
    "text_dim",
    "text_embed_dim",
    "caption_channels",
    "joint_attention_dim",
    "cross_attention_dim",
)


@dataclass
class Seen:
    """What one forward showed.

    Attributes:
        latents: the noisy input that was used, None if none was accepted.
        outputs: the tensors of the denoiser's output.
        blocks: for each block call in order, its output tensors.
        problem: why the forward could not be run, or None.
    """

    lists: list[BlockList]
    latents: Tensor | None = None
    outputs: list[Tensor] = field(default_factory=list)
    contract: Contract | None = None
    blocks: list[list[Tensor]] = field(default_factory=list)
    problem: str | None = None


def observe(source: Source, module: nn.Module, height: int, width: int, frames: int) -> Seen:
    """Tries the usual layouts of the noisy input until the forward takes one."""
    seen = Seen(find_block_lists(module))
    config = dict(getattr(module, "config", {}))
    channels = config.get("in_channels")
    if not isinstance(channels, int):
        seen.problem = "its config names no in_channels, so the noisy input cannot be made up"
        return seen
    latent = (
        1 if "2D" in source.cls.__name__ else (frames - 1) // source.temporal + 1,
        height // source.spatial,
        width // source.spatial,
    )
    packed = max(1, channels // (source.latent_channels or channels))
    shapes = _layouts(module, channels, latent, packed)
    if len(shapes[0]) == 3 and "2D" in source.cls.__name__ and source.config is None:
        seen.problem = "how its pipeline packs latents into tokens: give the pipeline's folder"
        return seen
    for shape in shapes:
        try:
            _run(seen, module, _arguments(module, config, shape, latent))
            return seen
        except _Unknown as error:
            seen.problem = str(error)
            return seen
        except Exception as error:  # not this layout; the first one's words are the likeliest
            text = " ".join(str(error).split())[:160]
            seen.problem = seen.problem or f"a forward with made-up inputs failed: {text}"
    return seen


class _Unknown(Exception):
    """The forward needs an argument that we cannot make up."""


def _run(seen: Seen, module: nn.Module, arguments: dict[str, Any]) -> None:
    observer, blocks = Observer(), []

    def watch(name: str, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = observer.block(name, block, args, kwargs)
        blocks.append((tensors_of(output) or ([], None))[0])
        return output

    with torch.no_grad(), shimmed(seen.lists, watch):
        output = module(**arguments, return_dict=False)
    seen.latents = next(iter(arguments.values()))
    seen.outputs = (tensors_of(output) or ([], None))[0]
    seen.contract, seen.blocks, seen.problem = observer.contract(), blocks, None


def _layouts(
    module: nn.Module, channels: int, latent: tuple[int, int, int], packed: int
) -> list[tuple[int, ...]]:
    """Shapes of the noisy input that suit the layer which takes it: video, image, or tokens."""
    f, h, w = latent
    first = next((part for part in module.modules() if _takes(part, channels)), None)
    if isinstance(first, nn.Linear):
        return [(1, f * h * w // packed, channels)]
    if "2D" in type(module).__name__:
        return [(1, channels, h, w)]
    video: list[tuple[int, ...]] = [(1, channels, f, h, w), (1, f, channels, h, w)]
    return video[:1] if isinstance(first, nn.Conv3d) else video


def _takes(layer: nn.Module, channels: int) -> bool:
    if isinstance(layer, (nn.Conv2d, nn.Conv3d)):
        return layer.in_channels == channels
    return isinstance(layer, nn.Linear) and layer.in_features == channels


def _arguments(
    module: nn.Module, config: dict[str, Any], shape: tuple[int, ...], latent: tuple[int, ...]
) -> dict[str, Any]:
    """Keyword arguments on the meta device, the noisy input first."""
    width = next((config[name] for name in TEXT_WIDTHS if isinstance(config.get(name), int)), None)
    words = config.get("max_text_seq_length") or TEXT_TOKENS
    tokens = shape[1] if len(shape) == 3 else latent[0] * latent[1] * latent[2]
    known: dict[str, Any] = {
        "pooled_projections": _meta(1, config.get("pooled_projection_dim") or 1),
        "guidance": _meta(1) if config.get("guidance_embeds") else None,
        "encoder_attention_mask": torch.ones(1, words, device="meta"),
        "txt_ids": _meta(words, 3),
        "img_ids": _meta(tokens, 3),
        "num_frames": latent[0],
        "height": latent[1],
        "width": latent[2],
    }
    if width is not None:
        known["encoder_hidden_states"] = _meta(1, words, width)
    made: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(module).forward).parameters.items():
        if name == "self" or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if not made:
            made[name] = _meta(*shape)
        elif name in TIMESTEP_NAMES:
            made[name] = torch.ones(1, device="meta")
        elif name in known and (parameter.default is parameter.empty or parameter.default is None):
            made[name] = known[name]
        elif parameter.default is parameter.empty:
            raise _Unknown(f"its forward needs {name!r}, which cannot be made up from the config")
    return made


def _meta(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")

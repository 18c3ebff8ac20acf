"""Finds the denoisers of a pipeline folder or class and builds them without weights."""

import inspect
import json
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ..parts import near
from . import demo_model_path
from .loading import DEMO


@dataclass(frozen=True)
class Source:
    """A denoiser to be built: its class and, from a folder, its config."""

    name: str
    cls: type
    config: dict[str, Any] | None
    spatial: int = 8  # pixels to a latent, each way
    temporal: int = 4  # frames to a latent
    latent_channels: int | None = None  # of the codec

    def build(self) -> nn.Module:
        """The module on the meta device, in bfloat16: shapes, no weights.

        Raises:
            ValueError: the class cannot be built from what is known.
        """
        import torch
        from diffusers.utils import logging

        logging.set_verbosity_error()
        try:
            with torch.device("meta"):
                made = self.cls() if self.config is None else self.cls.from_config(self.config)  # type: ignore
        except (TypeError, NotImplementedError) as error:
            raise ValueError(
                f"{self.cls.__name__} cannot be built from its defaults ({error}): "
                "give the folder of a pipeline"
            ) from error
        return made.to(torch.bfloat16).eval()


def find_sources(target: str) -> list[Source]:
    """The denoisers of a pipeline folder, a model folder, a diffusers class name, or "demo".

    Raises:
        ValueError: there is no such folder or class, or nothing in it takes a timestep.
    """
    folder = demo_model_path() if target == DEMO else Path(target)
    if (folder / "model_index.json").is_file():
        found = _of_pipeline_folder(folder)
    elif (folder / "config.json").is_file():
        config = _read(folder / "config.json")
        found = [Source(folder.name, _diffusers_class(str(config.get("_class_name"))), config)]
    elif folder.is_dir():
        raise ValueError(f"{target} holds neither model_index.json nor config.json")
    else:
        found = _of_class(_diffusers_class(target))
    found = [source for source in found if is_denoiser(source.name, source.cls)]
    if not found:
        raise ValueError(f"{target} has no denoiser: no module of it is called with a timestep")
    return found


def is_denoiser(name: str, cls: type) -> bool:
    from ..pipelines.denoisers import HELPERS
    from ..signature import TIMESTEP_NAMES

    if not issubclass(cls, nn.Module) or any(word in name for word in HELPERS):
        return False
    names = inspect.signature(cls.forward).parameters
    return any(name in names for name in TIMESTEP_NAMES)


def _of_pipeline_folder(folder: Path) -> list[Source]:
    index = _read(folder / "model_index.json")
    library, vae = index.get("vae") or (None, None)
    codec = {}
    if library == "diffusers":
        codec = _codec(_diffusers_class(str(vae)), _read(folder / "vae" / "config.json"))
    sources = []
    for name, entry in index.items():
        config = _read(folder / name / "config.json")
        if isinstance(entry, list) and entry[0] == "diffusers" and config:
            sources.append(Source(name, _diffusers_class(entry[1]), config, **codec))
    return sources


def _of_class(cls: type) -> list[Source]:
    """The class itself, or the components that a pipeline's constructor names."""
    if issubclass(cls, nn.Module):
        return [Source(cls.__name__, cls, None)]
    modules: dict[str, type] = {}
    for name, annotation in typing.get_type_hints(cls.__init__).items():
        for option in (annotation, *typing.get_args(annotation)):
            if isinstance(option, type) and issubclass(option, nn.Module):
                modules.setdefault(name, option)
    codec = _codec(modules["vae"], {}) if "vae" in modules else {}
    return [Source(name, module, None, **codec) for name, module in modules.items()]


def _codec(vae: type, config: dict[str, Any]) -> dict[str, int]:
    """What the codec tells of its latents: `spatial`, `temporal` and `latent_channels`."""
    import torch

    try:
        with torch.device("meta"):
            made = vae.from_config(config) if config else vae()  # type: ignore[attr-defined]
    except Exception:  # a codec that cannot be built this way tells nothing
        return {}
    known = dict(made.config)
    found = {"latent_channels": known.get("latent_channels") or known.get("z_dim")}
    for axis in ("spatial", "temporal"):
        name = f"{axis}_compression_ratio"
        value = known.get(f"scale_factor_{axis}") or known.get(name)
        found[axis] = value or getattr(made, name, None)
    return {name: value for name, value in found.items() if isinstance(value, int)}


def _diffusers_class(name: str) -> type:
    import diffusers

    cls = getattr(diffusers, name, None) if name.isidentifier() else None
    if not isinstance(cls, type):
        names = dict.fromkeys(n for n in dir(diffusers) if n[0].isupper())
        hint = near(name, names) if name.isidentifier() else ""
        hint = hint if hint.startswith("did") else "give a local pipeline folder or WanPipeline"
        raise ValueError(f"{name!r} is neither a folder nor a class of diffusers; {hint}")
    return cls


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}

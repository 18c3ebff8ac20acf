"""Loads a diffusers pipeline from a folder, from the hub, or the packaged demo model."""

import json
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import demo_model_path

DEMO, OFFLOAD = "demo", "offload"
DTYPES = ("auto", "float32", "bfloat16", "float16")
HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
TOLD = 300  # characters of a foreign error that are handed on


def load_pipeline(source: str | Path, *, dtype: str = "auto", device: str = "auto") -> Any:
    """The pipeline of `source`, silent, on its device.

    Args:
        source: a pipeline folder, a hub id ("owner/name"), or "demo" (the packaged model; a folder
            of that name is "./demo"). A folder is read without the network.
        dtype: "float32", "bfloat16" or "float16"; "auto" is float32 for the demo model and on the
            CPU, else bfloat16.
        device: as torch names it; "auto" takes CUDA or MPS where there is one, else the CPU;
            "offload" does too, and keeps there only the part that is at work.

    Raises:
        ValueError: unknown dtype or device, no such folder, not a pipeline, or the hub does not
            give it; the message says what to do.
    """
    place = _device(device)
    kind = _dtype(dtype, place, source)
    folder = local_folder(source)
    from diffusers import DiffusionPipeline

    quiet()
    with warnings.catch_warnings():
        # All releases that we allow take `torch_dtype`; the newest warn of it.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            pipe = DiffusionPipeline.from_pretrained(
                source if folder is None else folder,
                torch_dtype=kind,
                local_files_only=folder is not None,
            )
        except Exception as error:
            raise ValueError(_why(source, folder, error)) from error
    pipe.set_progress_bar_config(disable=True)
    if device == OFFLOAD:
        pipe.enable_model_cpu_offload(device=place)
        return pipe
    return pipe.to(place)


def pipeline_class(source: str | Path) -> Any:
    """The class that `load_pipeline` would make, without reading any weights.

    Raises:
        ValueError: as `load_pipeline`.
    """
    folder = local_folder(source)
    import diffusers

    try:
        index = _hub_index(str(source)) if folder is None else folder / "model_index.json"
    except Exception as error:
        raise ValueError(_why(source, folder, error)) from error
    return getattr(diffusers, _class_name(index))


def local_folder(source: str | Path) -> Path | None:
    """The folder that `source` names, known to hold a pipeline; None for a hub id.

    Raises:
        ValueError: it is neither a pipeline's folder nor a hub id.
    """
    folder = demo_model_path() if source == DEMO else Path(source).expanduser()
    if folder.is_dir():
        _class_name(folder / "model_index.json")
        return folder
    if folder.exists():
        raise ValueError(f"{source} is a file: give the folder that holds model_index.json")
    if isinstance(source, Path) or not HUB_ID.fullmatch(source):
        raise ValueError(
            f"there is no folder {source}, and it is no hub id: give a pipeline folder, "
            f"owner/name, or the word {DEMO}"
        )
    return None


def quiet() -> None:
    """Silences what diffusers and transformers log and draw while they load."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()
    for name in ("torchao", "diffusers.pipelines.pipeline_utils"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _hub_index(source: str) -> Path:
    """A hub pipeline's model_index.json, from the cache where it is there."""
    from huggingface_hub import hf_hub_download, model_info

    name = "model_index.json"
    try:
        return Path(hf_hub_download(source, name, local_files_only=True))
    except FileNotFoundError:
        model_info(source)  # without a network this fails at once; a download tries for 20 s
        return Path(hf_hub_download(source, name))


def _class_name(path: Path) -> str:
    """The class that a model_index.json names; ValueError where it names none of diffusers."""
    if not path.is_file():
        single = (path.parent / "config.json").is_file()
        one = " (a single model is no pipeline)" if single else ""
        raise ValueError(f"{path.parent} holds no {path.name}{one}: give a pipeline's folder")
    try:
        name = json.loads(path.read_text(encoding="utf-8"))["_class_name"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): download it again") from error
    return _known_class(name, str(path))


def _known_class(name: Any, where: str) -> str:
    import diffusers

    if not isinstance(name, str) or not hasattr(diffusers, name):
        raise ValueError(
            f"{where} names {name!r}, which diffusers {diffusers.__version__} does not know: "
            "update diffusers, or correct the name"
        )
    return name


def _device(name: str) -> Any:
    import torch

    if name in ("auto", OFFLOAD):
        mps = torch.backends.mps.is_available()
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    try:
        place = torch.device(name)
        torch.empty(0, device=place)
    except Exception as error:
        raise ValueError(f"device {name!r} cannot be used here: give cpu or auto") from error
    return place


def _dtype(name: str, place: Any, source: str | Path) -> Any:
    import torch

    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    if name == "auto":
        name = "float32" if source == DEMO or place.type == "cpu" else "bfloat16"
    return getattr(torch, name)


def _why(source: str | Path, folder: Path | None, error: BaseException) -> str:
    """What went wrong with a load, and what to do, on one line."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    chain = list(_chain(error))
    if any(isinstance(link, GatedRepoError) for link in chain):
        return f"{source} is gated: accept its terms on the hub, then log in with: hf auth login"
    if any(isinstance(link, RepositoryNotFoundError) for link in chain):
        return (
            f"there is no folder {source}, and the hub has none of that name or keeps it private: "
            "check the name, or log in with: hf auth login"
        )
    said = " ".join(str(error).split())
    said = said if len(said) <= TOLD else f"{said[:TOLD]} ..."
    if folder is not None:
        return f"{folder} cannot be loaded ({said}): download it again, or update diffusers"
    if any(isinstance(link, LocalEntryNotFoundError) or _is_connection(link) for link in chain):
        return (
            f"{source} is not in the local cache and the hub cannot be reached: check the "
            "connection (and HF_HUB_OFFLINE), or give a pipeline folder"
        )
    if any(isinstance(link, EntryNotFoundError) for link in chain):
        return f"{source} holds no model_index.json, so it is no pipeline: choose another"
    return f"{source} cannot be loaded ({said}): check the name, or give a pipeline folder"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _is_connection(error: BaseException) -> bool:
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & {"ConnectionError", "TimeoutError", "ConnectError", "TransportError"})

"""Compressed caches in safetensors files, to go on with in another process."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionLayer

from diffcache.kv.bits import Codec, Integer
from diffcache.kv.block import Block
from diffcache.kv.layer import CompressedLayer
from diffcache.kv.policy import KVPolicy

from .llm_facts import model_sizes

FORMAT = "1"
STATES = ("conv_states", "recurrent_states")
FLAGS = ("is_conv_states_initialized", "is_recurrent_states_initialized", "has_previous_state")
PLAIN = ("cumulative_length", "conv_kernel_size")


def save(cache: Any, path: str | Path) -> None:
    """Writes what a cache holds, its policy, and what model it is of; whole or not at all.

    Raises:
        ValueError: a layer of a kind whose states are not known.
    """
    tensors, about = dict(cache.tensors()), []
    for number, layer in enumerate(cache.layers):
        if hasattr(layer, "core"):
            about.append(_describe(layer.core))
        else:
            states, plain = _host_states(layer)
            tensors |= {f"host.{number}.{name}": tensor for name, tensor in states.items()}
            about.append({"host": type(layer).__name__, **plain})
    metadata = {
        "diffcache_kv_cache": FORMAT,
        "policy": json.dumps(cache.kv_policy.to_dict()),
        "model": json.dumps(cache.model),
        "layers": json.dumps(about),
    }
    path = Path(path)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        save_file({n: t.detach().contiguous() for n, t in tensors.items()}, partial, metadata)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: str | Path, state: Any) -> Any:
    """The cache that `save` wrote, for the wrapped model that `state` stands on.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not such a file, of another version or of another model.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no cache file {path}: check its path")
    device = next(state.decoder.parameters()).device
    try:
        with safe_open(path, "pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _check(metadata, state.decoder.config)
        policy = KVPolicy.from_dict(json.loads(metadata["policy"]))
        cache = state.cache(policy)
        _fill(cache, json.loads(metadata["layers"]), tensors)
    except (SafetensorError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a compressed cache, or damaged: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return cache


def _check(metadata: dict[str, str], config: Any) -> None:
    version = metadata.get("diffcache_kv_cache")
    if version != FORMAT:
        raise ValueError(f"diffcache_kv_cache must be {FORMAT}, got {version!r}")
    theirs, mine = json.loads(metadata["model"]), model_sizes(config)
    if theirs != mine:
        raise ValueError(f"the cache is of a model {theirs}, this one is {mine}")


def _describe(core: CompressedLayer) -> dict[str, Any]:
    blocks = [
        {
            "name": name,
            "codec": asdict(block.codec) if isinstance(block.codec, Integer) else None,
            "holes": block.holes,
        }
        for name, block in core.store.blocks.items()
    ]
    dtype = str(core.store.dtype).removeprefix("torch.")
    numbers = {"columns": core.columns, "steps": core.steps, "scaling": core.scaling}
    return {**numbers, "dtype": dtype, "blocks": blocks, "rows": core.rows}


def _fill(cache: Any, about: list[dict[str, Any]], tensors: dict[str, Tensor]) -> None:
    cache.timeline.restore(_under(tensors, "timeline."))
    number = 0
    for place, (layer, told) in enumerate(zip(cache.layers, about, strict=True)):
        if hasattr(layer, "core"):
            _restore(layer.core, told, _under(tensors, f"{number}."))
            number += 1
        else:
            _host_restore(layer, told, _under(tensors, f"host.{place}."))


def _restore(core: CompressedLayer, told: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    core.columns, core.steps = told["columns"], told["steps"]
    core.scaling, core.rows = told["scaling"], told["rows"]
    core.store.dtype = getattr(torch, told["dtype"])
    core.queries, core.query_index = tensors.get("queries"), tensors.get("query_index")
    for block in told["blocks"]:
        planes = _under(tensors, f"{block['name']}.")
        lengths = planes.pop("lengths", None)
        codec = Codec() if block["codec"] is None else Integer(**block["codec"])
        made = Block(codec=codec, planes=planes, lengths=lengths, holes=block["holes"])
        core.store.blocks[block["name"]] = made


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def _host_states(layer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and plain numbers of a layer that is transformers' own."""
    if type(layer) not in (DynamicSlidingWindowLayer, LinearAttentionLayer):
        raise ValueError(f"a {type(layer).__name__} cannot be saved: keep the cache in memory")
    tensors = {n: getattr(layer, n) for n in ("keys", "values") if hasattr(layer, n)}
    for name in STATES:
        tensors |= {f"{name}.{n}": t for n, t in getattr(layer, name, {}).items()}
    plain = {n: getattr(layer, n) for n in (*PLAIN, *FLAGS) if hasattr(layer, n)}
    return {n: t.clone() for n, t in tensors.items() if t is not None}, plain


def _host_restore(layer: Any, told: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    if told.get("host") != type(layer).__name__:
        raise ValueError(f"a layer is a {type(layer).__name__} here, not a {told.get('host')}")
    if "keys" in tensors:
        layer.lazy_initialization(tensors["keys"], tensors["values"])
        layer.keys, layer.values = tensors["keys"], tensors["values"]
    for name in STATES:
        found = {int(n): t for n, t in _under(tensors, f"{name}.").items()}
        if found:
            getattr(layer, name).update(found)
            layer.device, layer.dtype = next(iter(found.values())).device, found[0].dtype
    for name, value in told.items():
        if name in (*PLAIN, *FLAGS):
            plain = {int(k): v for k, v in value.items()} if isinstance(value, dict) else value
            setattr(layer, name, plain)

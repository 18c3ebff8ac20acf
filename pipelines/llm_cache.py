"""A transformers cache whose full-attention layers keep to a KV policy."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from diffcache.errors import DiffcacheError
from diffcache.kv.layer import CompressedLayer
from diffcache.kv.layer_view import Facts
from diffcache.kv.ledger import held_bytes
from diffcache.kv.policy import KVPolicy
from diffcache.kv.shares import Shares
from diffcache.kv.timeline import Timeline

_HANDED = threading.local()  # the layer whose keys the next attention call of this thread gets

OUTSIDE = (
    "keys reached a compressed cache outside a wrapped model's forward pass: call the model that "
    "was wrapped, or give this one a cache of its own"
)


class KVLayer(CacheLayerMixin):
    """One layer of a `CompressedCache`; what transformers asks of a layer, answered by ours."""

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, core: CompressedLayer) -> None:
        self.core = core

    @property
    def is_initialized(self) -> bool:
        return bool(self.core.store.blocks)

    @property
    def keys(self) -> Tensor | None:
        """[batch, heads, slots, head_dim] of what is kept; a copy where it is stored otherwise."""
        return self.core.store.read()[0] if self.is_initialized else None

    @property
    def values(self) -> Tensor | None:
        return self.core.store.read()[1] if self.is_initialized else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the store begins with the first tokens."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.core.timeline.columns != self.core.columns + key_states.shape[2]:
            raise DiffcacheError(OUTSIDE)
        keys_values = self.core.append(key_states, value_states)
        _HANDED.layer = self.core
        return keys_values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        # The host's mask spans all columns ever seen; the attention function picks ours from it.
        return self.core.columns + query_length, 0

    def get_seq_length(self) -> int:
        return self.core.columns

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.core.clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.core.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.core.select(_rows(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.core.select(_repeated(self.core.timeline.real, repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens; transformers counts them as a negative number."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the tokens to remove, got {tokens_to_remove}")
        if tokens_to_remove and self.is_initialized:
            self.core.crop(self.core.columns + tokens_to_remove)

    def offload(self) -> None:
        raise DiffcacheError("a compressed cache stays where it is: generate without offloading")

    prefetch = offload


def handed() -> CompressedLayer | None:
    """The layer that the attention call at hand belongs to; asking takes it away."""
    layer = getattr(_HANDED, "layer", None)
    _HANDED.layer = None
    return layer


class CompressedCache(DynamicCache):
    """What `generate` calls a cache, and more: `fork`, `rollback`, `compress`, `nbytes`, `save`.

    Layers of a kind that cannot grow without bound (sliding windows, linear attention) are left
    as transformers made them. An empty DynamicCache becomes one of these when a wrapped model is
    first called with it, so references to it stay good.
    """

    kv_policy: KVPolicy
    timeline: Timeline
    model: dict[str, Any]

    @classmethod
    def adopt(
        cls,
        cache: DynamicCache,
        policy: KVPolicy,
        facts: Iterable[Facts],
        model: dict[str, Any],
    ) -> None:
        """Turns an empty DynamicCache into a compressed one; `model` is what it is good for."""
        cache.__class__ = cls
        cache.kv_policy, cache.timeline, cache.model = policy, Timeline(), model
        shares, known = Shares(), list(facts)
        for number, layer in enumerate(cache.layers):
            if type(layer) is DynamicLayer:
                core = CompressedLayer(policy, cache.timeline, known[number], shares)
                shares.layers.append(core)
                cache.layers[number] = KVLayer(core)

    @property
    def cores(self) -> list[CompressedLayer]:
        """The layers that are compressed."""
        return [layer.core for layer in self.layers if isinstance(layer, KVLayer)]

    @property
    def nbytes(self) -> int:
        """Bytes really held, by the compressed layers and what they share."""
        return held_bytes(self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the compressed layers, and the tables they share, by name."""
        found = {f"timeline.{name}": t for name, t in self.timeline.tensors().items()}
        for number, core in enumerate(self.cores):
            found |= {f"{number}.{name}": tensor for name, tensor in core.tensors().items()}
        return found

    def begin(self, real: Tensor, positions: Tensor | None, roles: Tensor | None) -> None:
        """Before a forward pass: what its tokens are (see `Timeline.extend`)."""
        self.timeline.truncate(self.cores[0].columns)  # a pass that failed left its columns behind
        self.timeline.extend(real, positions, roles)

    def rollback(self, tokens: int) -> None:
        """Forgets the last `tokens` tokens; what was evicted before them stays evicted."""
        if tokens < 0 or tokens > self.get_seq_length():
            raise ValueError(f"tokens must be in [0, {self.get_seq_length()}], got {tokens}")
        self.crop(-tokens)

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        self.timeline.truncate(self.cores[0].columns)

    def fork(self) -> CompressedCache:
        """A copy that goes its own way."""
        return copy.deepcopy(self)

    def compress(self) -> None:
        """Compresses now, whatever the trigger says."""
        with torch.no_grad():
            for core in self.cores:
                core.force()

    def save(self, path: str | Path) -> None:
        """Writes everything to a safetensors file, for `diffcache.load_cache`."""
        from .llm_files import save

        save(self, path)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.timeline.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.timeline.select(_rows(indices))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self.timeline.select(_repeated(self.timeline.real, repeats))

    def reset(self) -> None:
        super().reset()
        self.timeline.clear()


def _rows(indices: Tensor) -> Tensor:
    """Numbers of rows from numbers or from a mask."""
    return indices.nonzero().flatten() if indices.dtype == torch.bool else indices


def _repeated(real: Tensor | None, repeats: int) -> Tensor:
    assert real is not None
    return torch.arange(real.shape[0], device=real.device).repeat_interleave(repeats)

"""Wraps a transformers language model: its caches keep to a KV policy, `generate` stays."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DummyLayer, DynamicCache, DynamicLayer

from diffcache.errors import DiffcacheError
from diffcache.kv.policy import KVPolicy
from diffcache.kv.report import KVReport

from .llm_attention import PREFIX, ours
from .llm_cache import CompressedCache
from .llm_facts import check_needs, facts, model_sizes

ATTRIBUTE = "_diffcache_kv"
_LIVE: weakref.WeakSet[WrappedLLM] = weakref.WeakSet()  # a config may be shared by several models

FILLED = (
    "this cache was filled without the KV policy: begin with an empty one, or call the model "
    "within diffcache.disabled(model)"
)


def is_llm(target: Any) -> bool:
    return isinstance(target, PreTrainedModel) and target.can_generate()


def state_of(model: nn.Module) -> WrappedLLM | None:
    return model.__dict__.get(ATTRIBUTE)


def wrap(model: PreTrainedModel, policy: KVPolicy, strict: bool) -> None:
    """Compresses what `model` caches from now on; wrapping again replaces the policy.

    Raises:
        ValueError: a model whose cache cannot be compressed; the message says why.
    """
    before = state_of(model)
    state = WrappedLLM(model, policy, strict)
    if before is not None:
        before.remove()
    state.install()


class WrappedLLM:
    """What stands on a wrapped model. Copies and pickles of the model are not wrapped."""

    def __init__(self, model: PreTrainedModel, policy: KVPolicy, strict: bool) -> None:
        self.model = weakref.ref(model)
        self.decoder = model.get_decoder()
        self.policy, self.strict = policy, strict
        self.paused = 0
        self.roles: Tensor | None = None
        self.cores: list[Any] = []
        self.summary: dict[str, Any] = {}
        self.behind = self.decoder.config._attn_implementation.removeprefix(PREFIX)
        self.name = ours(self.behind)
        self.kinds = [type(layer) for layer in self._fresh().layers]
        self._check()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def install(self) -> None:
        model = self.model()
        assert model is not None
        self.decoder.config._attn_implementation = self.name
        begin, end = Call(self.begin), Call(self.end)
        self.handles = [
            self.decoder.register_forward_pre_hook(begin, with_kwargs=True),
            self.decoder.register_forward_hook(end, with_kwargs=True),
        ]
        model.__dict__[ATTRIBUTE] = self
        _LIVE.add(self)

    def remove(self) -> None:
        """Takes everything off; the attention goes back once no other model shares the config."""
        for handle in self.handles:
            handle.remove()
        _LIVE.discard(self)
        config = self.decoder.config
        shared = any(other.decoder.config is config for other in _LIVE)
        if config._attn_implementation == self.name and not shared:
            config._attn_implementation = self.behind
        model = self.model()
        if model is not None:
            model.__dict__.pop(ATTRIBUTE, None)

    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before the decoder runs: its cache is ours and knows the tokens that come."""
        names = list(inspect.signature(module.forward).parameters)
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        key = "past_key_values" if "past_key_values" in given else "cache"
        cache = given.get(key)
        if cache is None and not self.paused and self._caches(given):
            cache = given[key] = self._fresh()
        if cache is None or (self.paused and not isinstance(cache, CompressedCache)):
            return None
        if self.decoder.config._attn_implementation != self.name:
            raise DiffcacheError(
                "the attention implementation was changed after wrap: wrap the model again"
            )
        self._adopt(cache)
        inputs = given.get("inputs_embeds")
        inputs = given["input_ids"] if inputs is None else inputs
        columns, new = cache.get_seq_length(), inputs.shape[1]
        cache.begin(
            _real(given.get("attention_mask"), inputs, columns),
            _positions(given.get("position_ids"), inputs, columns),
            _columns(_for_batch(self.roles, inputs.shape[0]), columns, new),
        )
        self.cores = cache.cores
        return (), given

    def end(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """After the decoder ran: what is held now, for the report."""
        if self.cores:
            self.summary = summarise(self, self.cores)

    def report(self) -> KVReport:
        rows = [dict(row) for core in self.cores for row in core.rows]
        rows.sort(key=lambda row: row["columns"])
        return KVReport(rows=rows, summary=self.summary or summarise(self, []))

    def reset(self) -> None:
        self.cores, self.summary = [], {}

    @contextmanager
    def marked(self, roles: Tensor) -> Iterator[None]:
        """Within, tokens have these roles: int [batch, columns], as an attention mask has."""
        if roles.ndim != 2 or roles.is_floating_point() or int(roles.amin()) < 0:
            raise ValueError(
                f"roles must be whole numbers from 0 to 127, [batch, columns], got {roles.dtype} "
                f"{list(roles.shape)}"
            )
        before, self.roles = self.roles, roles.to(torch.int8)
        try:
            yield
        finally:
            self.roles = before

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def _fresh(self) -> DynamicCache:
        return DynamicCache(config=self.decoder.config)

    def _caches(self, given: dict[str, Any]) -> bool:
        wanted = given.get("use_cache")
        return bool(self.decoder.config.use_cache if wanted is None else wanted)

    def _adopt(self, cache: Cache) -> None:
        if isinstance(cache, CompressedCache):
            return
        if type(cache) is not DynamicCache or cache.offloading:
            raise DiffcacheError(
                f"a {type(cache).__name__} cannot be compressed: leave cache_implementation out, "
                "pass a DynamicCache without offloading, or unwrap the model"
            )
        if any(getattr(layer, "is_initialized", False) for layer in cache.layers):
            raise DiffcacheError(FILLED)
        cache.layers = self._fresh().layers
        cache.layer_class_to_replicate = None
        self._compress(cache, self.policy)

    def cache(self, policy: KVPolicy) -> CompressedCache:
        """An empty compressed cache for this model."""
        made = self._fresh()
        self._compress(made, policy)
        assert isinstance(made, CompressedCache)
        return made

    def _compress(self, cache: DynamicCache, policy: KVPolicy) -> None:
        known = facts(self.decoder, self.kinds)
        CompressedCache.adopt(cache, policy, known, model_sizes(self.decoder.config))

    def _check(self) -> None:
        config, name = self.decoder.config, type(self.model()).__name__
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{name} is an encoder with a decoder: only decoders are compressed")
        if any(issubclass(kind, DummyLayer) for kind in self.kinds):
            raise ValueError(f"{name} shares keys and values between layers: cannot be compressed")
        if DynamicLayer not in self.kinds:
            kinds = ", ".join(sorted({kind.__name__ for kind in self.kinds}))
            raise ValueError(
                f"{name} has no full-attention layer to compress (its layers: {kinds}); "
                "sliding windows and linear attention are bounded already"
            )
        latent = getattr(config, "kv_lora_rank", None)
        for piece, each in ((self.policy.budget, "head"), (self.policy.compressor, "token")):
            if latent and getattr(piece, f"per_{each}"):
                raise ValueError(
                    f"{name} caches one latent for all heads: take another {piece.slot} than "
                    f"{piece.kind!r}, which works per {each} of keys and values"
                )
        known = facts(self.decoder, self.kinds)
        kept = [f for f, kind in zip(known, self.kinds, strict=True) if kind is DynamicLayer]
        check_needs(self.policy, kept, name)


class Call:
    """A hook that copies and pickles of the model lose."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def __call__(self, *args: Any) -> Any:
        return self.method(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert, ()


def _inert() -> Any:
    return _nothing


def _nothing(*args: Any) -> None:
    """What is left of a hook on a copy of the model."""


def summarise(state: WrappedLLM, cores: list[Any]) -> dict[str, Any]:
    alone = [kind.__name__ for kind in state.kinds if kind is not DynamicLayer]
    notes = [f"{len(alone)} layers ({', '.join(sorted(set(alone)))}) left as they are"] * bool(
        alone
    )
    if not cores:
        notes.append("nothing ran yet: call the model, then report")
    full, promised = sum(core.nbytes_full() for core in cores), 0
    if cores:
        tables = cores[0].timeline.tensors().values()
        promised = sum(t.numel() * t.element_size() for t in tables)
        promised += sum(core.nbytes_promised() for core in cores)
        if not any(core.rows for core in cores):
            notes.append("nothing was evicted: the tokens fit the budget, or no trigger fired")
    return {
        "policy": state.policy.name,
        "parts": state.policy.describe(),
        "layers": len(state.kinds) - len(alone),
        "left_alone": len(alone),
        "seen": cores[0].columns if cores else 0,
        "compressions": sum(len(core.rows) for core in cores),
        "bytes_held": promised,
        "bytes_full": full,
        "share_held": promised / full if full else 1.0,
        "notes": notes,
    }


def _real(mask: Any, inputs: Tensor, columns: int) -> Tensor:
    """bool [batch, new]: which of the new tokens are real."""
    batch, new = inputs.shape[:2]
    if mask is None:
        return torch.ones(batch, new, dtype=torch.bool, device=inputs.device)
    if not isinstance(mask, Tensor):
        raise DiffcacheError(
            "attention_mask must be a tensor to compress the cache: masks that were made "
            "beforehand are for static caches"
        )
    if mask.ndim == 4:
        seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        mask = seen.any(1).any(1).expand(batch, -1)
    fresh = _columns(mask, columns, new)
    assert fresh is not None
    return fresh.to(device=inputs.device, dtype=torch.bool)


def _for_batch(roles: Tensor | None, batch: int) -> Tensor | None:
    """Roles of a prompt for each of its beams."""
    if roles is None or roles.shape[0] == batch:
        return roles
    if batch % roles.shape[0]:
        raise ValueError(f"roles must have {batch} rows, got {roles.shape[0]}")
    return roles.repeat_interleave(batch // roles.shape[0], 0)


def _columns(table: Tensor | None, columns: int, new: int) -> Tensor | None:
    """The next `new` columns of [batch, columns]; zeros where it is shorter, as transformers."""
    if table is None:
        return None
    fresh = table[:, columns : columns + new]
    return torch.nn.functional.pad(fresh, (0, new - fresh.shape[1]))


def _positions(positions: Tensor | None, inputs: Tensor, columns: int) -> Tensor:
    """[axes, batch or 1, new] or [batch or 1, new], as the decoder rotates by."""
    new = inputs.shape[1]
    if positions is None:
        return torch.arange(columns, columns + new, device=inputs.device)[None]
    if positions.ndim == 3 and positions.shape[0] == 4:
        return positions[1:]  # the first row is for the mask, three axes follow
    return positions

"""Tiny random language models, and a full cache with the same tokens masked to compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.cache_utils import DynamicCache

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama(attn: str = "sdpa", **settings: Any) -> Any:
    """Two layers, 4 query and 2 key heads of 16."""
    return _made(LlamaConfig, attn, **settings)


def qwen3(attn: str = "sdpa", **settings: Any) -> Any:
    """With norms of queries and keys, and heads that do not add up to the hidden size."""
    return _made(Qwen3Config, attn, **{"head_dim": 24, **settings})


def _made(config: Any, attn: str, **settings: Any) -> Any:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        config(**{**SIZES, **settings}), attn_implementation=attn
    )
    return made.eval()


def ids(batch: int, length: int, seed: int = 1) -> Tensor:
    """int64 [batch, length] of tokens that are no padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def kept_columns(cache: Any) -> list[Tensor]:
    """For each layer bool [batch, heads, columns]: which columns it still holds."""
    found = []
    for core in cache.cores:
        index = core.store.plane("index").expand(-1, core.store.heads, -1)
        kept = torch.zeros(*index.shape[:2], core.columns + 1, dtype=torch.bool)
        kept.scatter_(2, index.where(index >= 0, core.columns), True)
        found.append(kept[..., : core.columns])
    return found


def error(logits: Tensor, reference: Tensor) -> float:
    """The largest difference, as a share of the largest logit."""
    return float((logits - reference).abs().max() / reference.abs().max())


@torch.no_grad()
def masked_full(
    model: Any, context: Any, later: Tensor, kept: list[Tensor], numbers: list[int] | None = None
) -> Tensor:
    """Logits of `later` after `context` in an untouched model whose layers cannot see more.

    The model runs eagerly, in double precision, with each layer's mask set by hand, so nothing
    of ours takes part.

    Args:
        context: tokens, or the inputs of a vision model by name.
        kept: for each layer of `numbers` (all by default) bool [batch, heads, columns].
    """
    model = model.double()
    inputs = context if isinstance(context, dict) else {"input_ids": context}
    doubled = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    cache = DynamicCache(config=model.config)
    model(**doubled, cache=cache)
    past, new = inputs["input_ids"].shape[1], later.shape[1]
    layers = model.get_decoder().layers
    heads = model.config.get_text_config().num_attention_heads
    handles = []
    for number, columns in zip(numbers or range(len(layers)), kept, strict=True):
        seen = columns[:, :, None, :past].expand(-1, -1, new, -1)
        causal = torch.ones(new, new, dtype=torch.bool).tril().expand(*seen.shape[:2], -1, -1)
        mask = torch.cat([seen, causal], -1)
        mask = mask.repeat_interleave(heads // mask.shape[1], 1)
        bias = torch.zeros(mask.shape, dtype=torch.float64)
        bias.masked_fill_(~mask, torch.finfo(bias.dtype).min)

        def put(module: Any, args: Any, kwargs: Any, bias: Tensor = bias) -> Any:
            return args, {**kwargs, "attention_mask": bias}

        attention = layers[number].self_attn
        handles.append(attention.register_forward_pre_hook(put, with_kwargs=True))
    logits = model(later, cache=cache).logits
    for handle in handles:
        handle.remove()
    return logits

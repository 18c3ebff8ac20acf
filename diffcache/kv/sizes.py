"""How many bytes a model's full cache holds, from its configuration alone."""

from __future__ import annotations

from typing import Any

import torch

from ..parts import check_count

SLIDING = ("sliding_attention", "chunked_attention")
NOTHING = ("moe", "mlp", "dummy")


def kv_bytes(
    config: Any, tokens: int, *, batch_size: int = 1, dtype: torch.dtype | None = None
) -> int:
    """Bytes of keys and values, and of the states of linear layers, after `tokens` tokens.

    Args:
        config: of a transformers model; of a multimodal one, its language model counts.
        dtype: of the cache; the configuration's own by default, else float32.

    Knows heads that share keys (GQA, MQA), latents (MLA: `kv_lora_rank` and the rotary part),
    sliding windows (a window of w holds w - 1 tokens between passes) and gated delta layers, whose
    state is that of transformers' own implementation (in fp32).

    Raises:
        ValueError: a kind of layer whose states are not known.
    """
    check_count("tokens", tokens, 0)
    check_count("batch_size", batch_size, 1)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    given = dtype or getattr(text, "dtype", None) or torch.float32
    itemsize = (getattr(torch, given) if isinstance(given, str) else given).itemsize
    layers = _layer_types(text)
    return batch_size * sum(_layer(text, kind, tokens, itemsize) for kind in layers)


def token_bytes(config: Any, itemsize: int) -> int:
    """Bytes of the keys and values of one token in one layer."""
    rank = getattr(config, "kv_lora_rank", None)
    if rank:
        return int(rank + config.qk_rope_head_dim) * itemsize
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    value = getattr(config, "v_head_dim", None) or size
    return int(heads * (size + value)) * itemsize


def _layer_types(config: Any) -> list[str]:
    types = getattr(config, "layer_types", None)
    if types is None:
        sliding = getattr(config, "sliding_window", None) is not None
        types = [SLIDING[0] if sliding else "full_attention"] * config.num_hidden_layers
    modes = getattr(config, "kv_sharing_modes", None) or [None] * len(types)
    return ["dummy" if m == "reuse" else t for t, m in zip(types, modes, strict=True)]


def _layer(config: Any, kind: str, tokens: int, itemsize: int) -> int:
    if kind == "full_attention":
        return tokens * token_bytes(config, itemsize)
    if kind in SLIDING:
        name = "sliding_window" if kind == SLIDING[0] else "attention_chunk_size"
        return min(tokens, int(getattr(config, name)) - 1) * token_bytes(config, itemsize)
    if kind in NOTHING:
        return 0
    if kind == "linear_attention" and hasattr(config, "linear_num_value_heads"):
        return _gated_delta(config, itemsize) if tokens else 0
    if kind == "conv" and hasattr(config, "conv_L_cache"):
        return int(config.hidden_size * config.conv_L_cache) * itemsize if tokens else 0
    raise ValueError(
        f"the states of {kind!r} layers of {type(config).__name__} are not known: "
        "measure a cache with diffcache.kv.held_bytes"
    )


def _gated_delta(config: Any, itemsize: int) -> int:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    conv = (2 * keys + values) * config.linear_conv_kernel_dim * itemsize
    return int(conv + values * config.linear_key_head_dim * 4)

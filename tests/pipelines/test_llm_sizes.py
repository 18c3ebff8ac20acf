"""`kv_bytes` is what a full cache of transformers really holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.lfm2 import Lfm2Config
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_next import Qwen3NextConfig

from diffcache.kv import held_bytes, kv_bytes

BASE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
GROUPS = {"v_head_dim": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
CONFIGS = {
    "MHA": (LlamaConfig, {"num_key_value_heads": 4}),
    "GQA": (LlamaConfig, {}),
    "MQA": (LlamaConfig, {"num_key_value_heads": 1}),
    "wide heads": (Qwen3Config, {"head_dim": 24}),
    "MLA": (DeepseekV3Config, {**EXPERTS, **LATENT, **GROUPS, "num_key_value_heads": 4}),
    "sliding": (MistralConfig, {"sliding_window": 8}),
    "mixed": (
        Gemma3TextConfig,
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "linear": (Qwen3NextConfig, {**EXPERTS, **DELTA, "num_experts": 4, "head_dim": 16}),
    "convolution": (Lfm2Config, {"layer_types": ["conv", "full_attention"] * 2}),
}


def states(layer: Any) -> list[torch.Tensor]:
    """Every tensor that a layer of transformers holds from pass to pass."""
    found = [getattr(layer, name, None) for name in ("keys", "values")]
    for name in ("conv_states", "recurrent_states"):
        found += list(getattr(layer, name, {}).values())
    # A sliding window is a view of more than it needs until the next pass.
    return [tensor.clone() for tensor in found if tensor is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [5, 20])
@pytest.mark.parametrize("kind", CONFIGS)
def test_kv_bytes_are_the_bytes_of_a_full_cache(kind: str, tokens: int, dtype: torch.dtype) -> None:
    make, settings = CONFIGS[kind]
    config = make(**{**BASE, **settings})
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    cache = DynamicCache(config=config)
    with torch.no_grad():
        model(torch.randint(1, 60, (2, tokens)), cache=cache)
    held = held_bytes(tensor for layer in cache.layers for tensor in states(layer))
    assert held == kv_bytes(config, tokens, batch_size=2, dtype=dtype)


def test_an_unknown_kind_of_layer_is_refused() -> None:
    config = LlamaConfig(**BASE)
    config.layer_types = ["retention"] * 4
    with pytest.raises(ValueError, match="states of 'retention' layers"):
        kv_bytes(config, 10)

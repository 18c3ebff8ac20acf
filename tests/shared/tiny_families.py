"""Tiny random models of many families, text and vision, from their configurations alone."""

from __future__ import annotations

from typing import Any

import torch
from tiny_llms import SIZES
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.glm import GlmConfig
from transformers.models.llava import LlavaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.phi import PhiConfig
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen2_5_vl import Qwen2_5_VLConfig
from transformers.models.qwen3_next import Qwen3NextConfig
from transformers.models.smolvlm import SmolVLMConfig

TEXT = {**SIZES, "num_hidden_layers": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
}
DELTA = {
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "num_experts": 4,
    "shared_expert_intermediate_size": 32,
}
MIXED = ["sliding_attention", "full_attention"] * 2
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gemma2": (Gemma2Config, {"head_dim": 16, "sliding_window": 16}),
    "gemma3": (Gemma3TextConfig, {"head_dim": 16, "sliding_window": 16, "layer_types": MIXED}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "phi": (PhiConfig, {}),
    "phi3": (Phi3Config, {}),
    "glm": (GlmConfig, {"head_dim": 16}),
    "deepseek": (DeepseekV3Config, {**EXPERTS, **LATENT}),
    "qwen3_next": (Qwen3NextConfig, {**EXPERTS, **DELTA}),
}
IMAGE, START, END = 90, 91, 92  # tokens


def family(name: str, attn: str = "eager") -> Any:
    config, settings = FAMILIES[name]
    torch.manual_seed(0)
    made = config(**{**TEXT, **settings})
    model = AutoModelForCausalLM.from_config(made, attn_implementation=attn).eval()
    model.set_experts_implementation("eager")  # the others do not run in double precision
    return model


def _vision(name: str) -> PreTrainedConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 2, "image_size": 16, "patch_size": 4}
    if name == "qwen2_5_vl":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
        tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
        tower |= {"patch_size": 4, "window_size": 16, "out_hidden_size": 64}
        tower |= {"fullatt_block_indexes": [1]}
        tokens = {"image_token_id": IMAGE, "video_token_id": 93}
        tokens |= {"vision_start_token_id": START, "vision_end_token_id": END}
        text = {**TEXT, "rope_parameters": rope}
        return Qwen2_5_VLConfig(text_config=text, vision_config=tower, **tokens)
    text = {"model_type": "llama", **TEXT}
    if name == "llava":
        tower = {"model_type": "clip_vision_model", "projection_dim": 32, **sizes}
        return LlavaConfig(text_config=text, vision_config=tower, image_token_index=IMAGE)
    return SmolVLMConfig(
        text_config=text, vision_config=sizes, image_token_id=IMAGE, scale_factor=2
    )


def vision_family(name: str, attn: str = "sdpa") -> Any:
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(_vision(name), attn_implementation=attn).eval()


def vision_inputs(name: str, text: int = 40) -> dict[str, torch.Tensor]:
    """One image of 16 tokens (SmolVLM: 4) after ten words, then `text` words."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(1, 80, (1, 10 + text), generator=generator)
    count = 4 if name == "smolvlm" else 16
    image = torch.full((1, count), IMAGE)
    parts = [words[:, :10], torch.tensor([[START]]), image, torch.tensor([[END]]), words[:, 10:]]
    ids = torch.cat(parts, 1)
    inputs = {"input_ids": ids}
    if name == "qwen2_5_vl":
        inputs["pixel_values"] = torch.randn(64, 96, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, 8, 8]])
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    elif name == "llava":
        inputs["pixel_values"] = torch.randn(1, 3, 16, 16, generator=generator)
    else:
        inputs["pixel_values"] = torch.randn(1, 1, 3, 16, 16, generator=generator)
    return inputs

"""A tiny demo model with random weights, and a way to call the command line as a user does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from diffcache.cli import main

WORDS = [
    "<pad>",
    "</s>",
    "<unk>",
    "a",
    "red",
    "blue",
    "circle",
    "square",
    "moving",
    "left",
    "up",
    "on",
    "grey",
    "background",
]
PROMPTS = ["a red circle moving left on a grey background", "a blue square moving up"]


@dataclass
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def diffcache(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `diffcache ARGUMENTS` in this process."""

    def run(*arguments: str) -> Ran:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return Ran(int(ended.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def tiny_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the demo model's: a whole WanPipeline and demo.json, 12 steps, 5 frames."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline

    folder = tmp_path_factory.mktemp("models") / "tiny-wan"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipe = WanPipeline(
            tokenizer=_tokenizer(),
            text_encoder=_text_encoder(),
            transformer=_transformer(),
            vae=AutoencoderKLWan(
                base_dim=4,
                z_dim=4,
                dim_mult=[1, 1, 1],
                num_res_blocks=1,
                temperal_downsample=[True, True],
                latents_mean=[0.0] * 4,
                latents_std=[1.0] * 4,
                scale_factor_spatial=4,
                scale_factor_temporal=4,
            ),
            scheduler=UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.0
            ),
        )
    pipe.save_pretrained(folder)
    settings = {
        "prompts": PROMPTS,
        "seeds": [0, 1],
        "guidance_scale": 3.0,
        "height": 32,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 12,
        "max_sequence_length": 16,
    }
    (folder / "demo.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {word: i for i, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def _text_encoder() -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(WORDS),
            d_model=16,
            d_kv=8,
            num_heads=2,
            d_ff=32,
            num_layers=1,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def _transformer() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_layers=4,
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        rope_max_seq_len=32,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )


@pytest.fixture
def environment(repo_root):
    """For a process of its own: this checkout, one thread, no hub."""
    path = os.pathsep.join([str(repo_root), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

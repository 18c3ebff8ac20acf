"""The demo's tokenizer and text encoder, and prompts as the transformer sees them.

`WanPipeline` pads a prompt's embeddings with zeros to 512 positions and does not mask them. Zero
positions are all alike, so attention over n of them equals attention over one with log(n) added to
its score. Training uses that.
"""

import math

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from samples.train.clips import BACKGROUNDS, COLOURS, DIRECTIONS, SHAPES

WIDTH = 20  # positions kept in training: the longest sentence has 16 tokens
LENGTHS = (32, 64, 128, 226, 512, 512, 512)
WORDS = ("a", "and", "moving", "on", "background", *COLOURS, *SHAPES, *DIRECTIONS, *BACKGROUNDS)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word of the demo's sentences."""
    vocabulary = {word: i for i, word in enumerate(("<pad>", "</s>", "<unk>", *WORDS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=512,
    )


def build_encoder() -> UMT5EncoderModel:
    """A two-layer UMT5 encoder, width 64."""
    return UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(WORDS) + 3,
            d_model=64,
            d_kv=16,
            num_heads=4,
            d_ff=128,
            num_layers=2,
            dropout_rate=0.0,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def embed(
    encoder: UMT5EncoderModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: list[str],
    lengths: Tensor,
) -> tuple[Tensor, Tensor]:
    """Embeddings [B, WIDTH, 64], zero after each prompt, and attention biases [B, 1, 1, WIDTH].

    The first zero position stands for all of them, the others are masked. lengths: [B], how many
    positions the pipeline would pad each prompt to.
    """
    batch = tokenizer(prompts, padding="max_length", max_length=WIDTH, return_tensors="pt")
    mask = batch.attention_mask
    hidden = encoder(batch.input_ids, mask).last_hidden_state * mask[..., None]
    real = mask.sum(dim=1, keepdim=True)
    bias = torch.where(mask == 1, 0.0, -math.inf)
    bias = bias.scatter(1, real, (lengths[:, None] - real).float().log())
    return hidden, bias[:, None, None]

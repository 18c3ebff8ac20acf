"""The demo's untrained transformer, and transformer and text encoder as one trainable module."""

from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import Tensor, nn

from samples.train.text import build_encoder


class BiasedCrossAttention(WanAttnProcessor):
    """The stock processor with an additive bias on the text, set before each training step."""

    bias: Tensor | None = None

    def __call__(
        self, attn: nn.Module, hidden_states: Tensor, encoder_hidden_states: Tensor, *_: object
    ) -> Tensor:
        return super().__call__(attn, hidden_states, encoder_hidden_states, self.bias, None)


def build() -> WanTransformer3DModel:
    """The untrained transformer; what feeds each residual sum starts at zero."""
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=16,
        out_channels=16,
        text_dim=64,
        freq_dim=64,
        ffn_dim=384,
        num_layers=12,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=128,
    )
    zeroed = [
        model.proj_out,
        model.condition_embedder.time_proj,
        *(b.attn2.to_out[0] for b in model.blocks),
    ]
    for layer in zeroed:
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return model


class Pair(nn.Module):
    """Transformer and text encoder as one module, so that one average and one file hold both."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer, self.text = build(), build_encoder()
        self.cross = BiasedCrossAttention()
        for block in self.transformer.blocks:
            block.attn2.set_processor(self.cross)

    def split(self) -> tuple[list[Tensor], list[Tensor]]:
        """Matrices inside the blocks for Muon, the rest for AdamW."""
        inner = [
            w
            for n, w in self.transformer.blocks.named_parameters()
            if w.ndim == 2 and n.endswith("weight")
        ]
        chosen = {id(w) for w in inner}
        return inner, [w for w in self.parameters() if id(w) not in chosen]

"""Random pipelines of the stock classes that generate chunk by chunk; each runs in about a second.

A `Tiny` makes its pipeline and calls it as a user would; 9 steps a chunk, since fewer than 8 are
never cached unless forced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from tiny_pipelines import _parts, _quiet, _seeded, embeddings
from toys import TEXT_DIM, TINY_WAN, start

STEPS = 9
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 2.0}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A pipeline class on random weights.

    Attributes:
        make: builds it; equal each time.
        call: arguments of its `__call__`, without the generator.
        chunks: the chunks of that call.
        writes: the chunk of each pass that writes keys and values, in order.
        passes: guidance passes that are calls of their own.
        steps: denoising steps in each chunk.
    """

    make: Callable[[], Any]
    call: Mapping[str, Any]
    chunks: int
    writes: tuple[int | None, ...] = ()
    passes: int = 1
    steps: tuple[int, ...] = field(default=(STEPS, STEPS, STEPS))

    def run(self, pipe: Any, seed: int = 0) -> torch.Tensor:
        """The latents, or the video, of one call."""
        output = pipe(**self.call, generator=torch.Generator().manual_seed(seed))
        output = getattr(output, "frames", output)
        if isinstance(output, list):  # FramePack hands out its sections' latents
            output = output[-1]
        return torch.as_tensor(output)


def tokenizer() -> Any:
    """Whole words of a small vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", "a", "red", "circle", "blue", "square"]
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=32, **special)


def anyflow_far() -> Tiny:
    """Three chunks of 1, 2 and 2 latent frames; the second clean pass sees two chunks."""
    from diffusers import (
        AnyFlowFARPipeline,
        AnyFlowFARTransformer3DModel,
        FlowMapEulerDiscreteScheduler,
    )

    def make() -> Any:
        model = _seeded(
            0,
            AnyFlowFARTransformer3DModel,
            **{**_without(TINY_WAN, "qk_norm"), "compressed_patch_size": (1, 4, 4)},
            full_chunk_limit=2,
            chunk_partition=(1, 2, 2),
        )
        parts = {**_parts(), "scheduler": FlowMapEulerDiscreteScheduler(shift=2.0)}
        return _quiet(AnyFlowFARPipeline(transformer=model, **parts))

    call = {**_clip(17, size=32), "prompt_embeds": embeddings()["prompt_embeds"]}
    call |= {"num_inference_steps": STEPS, "output_type": "latent"}
    return Tiny(make=make, call=call, chunks=3, writes=(0, 1))


def helios() -> Tiny:
    from diffusers import HeliosPipeline, HeliosScheduler

    def make() -> Any:
        scheduler = HeliosScheduler(stages=1, scheduler_type="unipc", use_dynamic_shifting=True)
        parts = {**_parts(), "scheduler": scheduler}
        return _quiet(HeliosPipeline(transformer=_helios_model(), **parts))

    call = {**_helios_call(), "num_inference_steps": STEPS}
    return Tiny(make=make, call=call, chunks=3, passes=2)


def helios_pyramid() -> Tiny:
    """Two stages of 9 steps in each chunk, the first at half the height and width."""
    from diffusers import HeliosPyramidPipeline, HeliosScheduler

    def make() -> Any:
        scheduler = HeliosScheduler(stages=2, stage_range=[0, 0.5, 1], scheduler_type="unipc")
        parts = {**_parts(), "scheduler": scheduler}
        return _quiet(HeliosPyramidPipeline(transformer=_helios_model(), **parts))

    call = {**_helios_call(), "pyramid_num_inference_steps_list": [STEPS, STEPS]}
    return Tiny(make=make, call=call, chunks=3, passes=2, steps=(2 * STEPS,) * 3)


def _helios_model() -> Any:
    from diffusers import HeliosTransformer3DModel

    config = {**_without(TINY_WAN, "rope_max_seq_len"), "rope_dim": (4, 4, 4)}
    return _seeded(0, HeliosTransformer3DModel, **config)


def _helios_call() -> dict[str, Any]:
    return {
        **_clip(15, size=64),
        **embeddings(),
        "history_sizes": [4, 2, 1],
        "num_latent_frames_per_chunk": 2,
        "output_type": "latent",
    }


def framepack() -> Tiny:
    """Three sections, the last one first."""
    import diffusers
    from transformers import SiglipImageProcessor, SiglipVisionConfig, SiglipVisionModel

    def make() -> Any:
        model = _seeded(
            0,
            diffusers.HunyuanVideoFramepackTransformer3DModel,
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=2,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=TEXT_DIM,
            pooled_projection_dim=8,
            rope_axes_dim=(4, 4, 4),
            has_image_proj=True,
            image_proj_dim=8,
            has_clean_x_embedder=True,
        )
        vae = _seeded(
            0,
            diffusers.AutoencoderKLHunyuanVideo,
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4,
            block_out_channels=(4, 4, 4, 4),
            layers_per_block=1,
            norm_num_groups=2,
            mid_block_add_attention=False,
        )
        sizes = {"hidden_size": 8, "intermediate_size": 8, "image_size": 16, "patch_size": 8}
        config = SiglipVisionConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)
        pipe = diffusers.HunyuanVideoFramepackPipeline(
            transformer=model,
            vae=vae,
            image_encoder=_seeded(0, SiglipVisionModel, config=config),
            feature_extractor=SiglipImageProcessor(size={"height": 16, "width": 16}),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0),
            **dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")),
        )
        return _quiet(pipe)

    call = {
        **_clip(15, size=32),
        "image": _picture(32),
        "latent_window_size": 2,
        "num_inference_steps": STEPS,
        "true_cfg_scale": 3.0,
        "output_type": "pt",
    }
    for name, seed in (("", 0), ("negative_", 1000)):
        call[f"{name}prompt_embeds"] = start(1, 6, TEXT_DIM, seed=seed)
        call[f"{name}pooled_prompt_embeds"] = start(1, 8, seed=seed)
        call[f"{name}prompt_attention_mask"] = torch.ones(1, 6)
    return Tiny(make=make, call=call, chunks=3, passes=2)


def skyreels(**call: Any) -> Tiny:
    """Windows of 3 latent frames, one of them from the window before."""
    import diffusers

    def make() -> Any:
        model = _seeded(0, diffusers.SkyReelsV2Transformer3DModel, **TINY_WAN)
        parts = {**_parts(), "scheduler": diffusers.UniPCMultistepScheduler(**FLOW)}
        return _quiet(diffusers.SkyReelsV2DiffusionForcingPipeline(transformer=model, **parts))

    default = {"base_num_frames": 9, "overlap_history": 1, "output_type": "latent"}
    given = {"prompt": None, **_clip(25), **embeddings(), "num_inference_steps": STEPS}
    return Tiny(make=make, call={**given, **default, **call}, chunks=3, passes=2)


def ltx_long() -> Tiny:
    """Three windows with two prompts; both guidance passes in one batch."""
    import diffusers
    from transformers import T5Config, T5EncoderModel

    def make() -> Any:
        model = _seeded(
            0,
            diffusers.LTXVideoTransformer3DModel,
            in_channels=8,
            out_channels=8,
            num_attention_heads=2,
            attention_head_dim=12,
            cross_attention_dim=24,
            num_layers=3,
            caption_channels=TEXT_DIM,
        )
        sizes = {"d_model": TEXT_DIM, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        config = T5Config(vocab_size=8, **sizes)
        pipe = diffusers.LTXI2VLongMultiPromptPipeline(
            transformer=model,
            scheduler=diffusers.LTXEulerAncestralRFScheduler(),
            vae=None,
            text_encoder=_seeded(0, T5EncoderModel, config=config),
            tokenizer=tokenizer(),
        )
        return _quiet(pipe)

    call = {
        "prompt": "a red circle | a blue square",
        "negative_prompt": "square",
        "height": 64,
        "width": 64,
        "num_frames": 41,
        "temporal_tile_size": 24,
        "temporal_overlap": 8,
        "guidance_scale": 3.0,
        "num_inference_steps": STEPS + 1,  # the pipeline leaves the last one out
        "max_sequence_length": 8,
    }
    return Tiny(make=make, call=call, chunks=3)


def wan_animate() -> Tiny:
    """Three segments that share one frame."""
    import diffusers
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    def make() -> Any:
        config = {
            **TINY_WAN,
            "num_layers": 4,
            "in_channels": 4 + 4 + 4,
            "latent_channels": 4,
            "image_dim": 4,
            "motion_encoder_channel_sizes": dict.fromkeys(map(str, (4, 8, 16)), 4),
            "motion_encoder_size": 16,
            "motion_style_dim": 4,
            "motion_dim": 2,
            "motion_encoder_dim": 4,
            "face_encoder_hidden_dim": 8,
            "face_encoder_num_heads": 2,
            "inject_face_latents_blocks": 2,
        }
        model = _seeded(0, diffusers.WanAnimateTransformer3DModel, **config)
        sizes = {"hidden_size": 4, "intermediate_size": 8, "image_size": 4, "patch_size": 2}
        vision = CLIPVisionConfig(num_hidden_layers=2, num_attention_heads=2, **sizes)
        pipe = diffusers.WanAnimatePipeline(
            transformer=model,
            image_encoder=_seeded(0, CLIPVisionModel, config=vision),
            image_processor=CLIPImageProcessor(size=4, crop_size=4),
            **_parts(),
        )
        return _quiet(pipe)

    frames = [_picture(16, seed) for seed in range(13)]
    call = {
        "image": _picture(16),
        "pose_video": frames,
        "face_video": frames,
        "height": 16,
        "width": 16,
        "segment_frame_length": 5,
        "guidance_scale": 3.0,
        **embeddings(),
        "num_inference_steps": STEPS,
        "output_type": "pt",
    }
    return Tiny(make=make, call=call, chunks=3, passes=2)


def sana_refiner() -> Tiny:
    """One sink frame and three blocks of two frames; a window that slides."""
    import diffusers
    from diffusers.pipelines.ltx2.connectors import LTX2TextConnectors
    from diffusers.pipelines.sana_wm.refiner import SanaWMLTX2Refiner
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    def make() -> Any:
        heads = {"num_attention_heads": 2, "attention_head_dim": 12, "cross_attention_dim": 24}
        model = _seeded(
            0,
            diffusers.SanaWMLTX2RefinerTransformer3DModel,
            in_channels=8,
            out_channels=8,
            num_layers=3,
            caption_channels=16,
            audio_in_channels=4,
            audio_out_channels=4,
            **heads,
            **{f"audio_{name}": value for name, value in heads.items()},
        )
        connectors = _seeded(
            0,
            LTX2TextConnectors,
            caption_channels=16,
            text_proj_in_factor=2,
            connector_rope_base_seq_len=32,
            **{
                f"{kind}_connector_{name}": value
                for kind in ("video", "audio")
                for name, value in {
                    "num_attention_heads": 2,
                    "attention_head_dim": 8,
                    "num_layers": 1,
                    "num_learnable_registers": 8,
                }.items()
            },
        )
        text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
        config = Gemma3Config(
            text_config={
                **text,
                "vocab_size": 300,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 8,
            },
            vision_config={**text, "num_attention_heads": 2, "image_size": 14, "patch_size": 14},
            mm_tokens_per_image=1,
            image_token_index=299,
        )
        pipe = SanaWMLTX2Refiner(
            transformer=model,
            connectors=connectors,
            tokenizer=tokenizer(),
            text_encoder=_seeded(0, Gemma3ForConditionalGeneration, config=config),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=1.0),
            text_max_sequence_length=8,
        )
        return _quiet(pipe)

    sigmas = [0.909375 * (1 - i / STEPS) for i in range(STEPS)]
    call = {
        "sana_latent": start(1, 8, 7, 2, 2),
        "prompt": "a red circle",
        "fps": 16.0,
        "block_size": 2,
        "kv_max_frames": 4,
        "sigmas": (*sigmas, 0.0),
    }
    return Tiny(make=make, call=call, chunks=3, writes=(None, 0, 1, 2))


def _without(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != name}


def _clip(num_frames: int, size: int = 16) -> dict[str, Any]:
    return {"height": size, "width": size, "num_frames": num_frames}


def _picture(size: int, seed: int = 0) -> Any:
    from PIL import Image

    pixels = (start(size, size, 3, seed=seed).sigmoid() * 255).to(torch.uint8)
    return Image.fromarray(pixels.numpy())


TINIES: Mapping[str, Callable[[], Tiny]] = {
    "AnyFlowFARPipeline": anyflow_far,
    "SanaWMLTX2Refiner": sana_refiner,
    "HeliosPipeline": helios,
    "HeliosPyramidPipeline": helios_pyramid,
    "HunyuanVideoFramepackPipeline": framepack,
    "SkyReelsV2DiffusionForcingPipeline": skyreels,
    "LTXI2VLongMultiPromptPipeline": ltx_long,
    "WanAnimatePipeline": wan_animate,
}

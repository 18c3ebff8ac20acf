"""How diffusers' chunk by chunk pipelines show where a run and where a chunk begins.

A pipeline calls some of its own methods once for each run, and others once for each chunk: these
calls are listened to, on the instance. Two models tell more: AnyFlow FAR hands the chunks so far to
its transformer, and SANA-WM's refiner writes keys and values after each chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diffcache.progress import ChunkRule


def chunk_rule(pipeline: Any) -> ChunkRule | None:
    """The rule of this pipeline's class, or of the nearest class that it is made from."""
    names = (cls.__name__ for cls in type(pipeline).__mro__)
    return next((CHUNKED[name] for name in names if name in CHUNKED), None)


def _partition_length(arguments: Mapping[str, Any]) -> int | None:
    partition = arguments.get("chunk_partition")
    return len(partition) - 1 if partition else None


LATENTS = ChunkRule(run="check_inputs", chunk="prepare_latents")
CHUNKED: Mapping[str, ChunkRule] = {
    "AnyFlowFARPipeline": ChunkRule(run="check_inputs", told=_partition_length),
    "SanaWMLTX2Refiner": ChunkRule(run="_encode_prompt", after_write=True),
    "HeliosPipeline": LATENTS,
    "HeliosPyramidPipeline": LATENTS,
    "HunyuanVideoFramepackPipeline": LATENTS,
    "SkyReelsV2DiffusionForcingPipeline": LATENTS,
    "SkyReelsV2DiffusionForcingImageToVideoPipeline": LATENTS,
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline": LATENTS,
    "LTXI2VLongMultiPromptPipeline": ChunkRule(
        run="prepare_latents", chunk="encode_prompt", masked=True
    ),
    "WanAnimatePipeline": LATENTS,
}

"""One video that shows every method side by side, so that they cannot run out of step."""

import base64
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor, from_numpy

from .media import write_mp4

FPS = 8
TILE = 192  # pixels across, at least
GAIN = 8  # how much errors are brightened

Array = np.ndarray[Any, Any]


def mosaic(clips: Sequence[Array]) -> Array:
    """uint8 [F, 2*h, n*w, 3]: n clips [F, H, W, 3] in a row, below each its error to the first."""
    errors = [np.abs(clip - clips[0]) * GAIN for clip in clips]
    rows = [np.concatenate([_enlarge(clip) for clip in row], axis=2) for row in (clips, errors)]
    return np.concatenate(rows, axis=1)


def as_mp4(frames: Array, fps: float = FPS) -> str | None:
    """An H.264 data URI of uint8 [F, H, W, 3]; None without imageio-ffmpeg."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "clip.mp4"
        try:
            write_mp4(frames, path, fps, seekable=True)
        except ImportError:
            return None
        return _data_uri("video/mp4", path.read_bytes())


def as_png(frame: Array) -> str:
    """A PNG data URI of uint8 [H, W, 3]."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG")
    return _data_uri("image/png", buffer.getvalue())


def _enlarge(clip: Array) -> Array:
    """uint8 [F, h, w, 3] with w at least TILE, both even."""
    scale = 2 * max(1, -(-TILE // clip.shape[2]) // 2)
    frames: Tensor = from_numpy(clip).float().movedim(-1, 1)
    larger = F.interpolate(frames, scale_factor=scale, mode="bicubic").clamp(0, 1)
    return (larger * 255).round().byte().movedim(1, -1).numpy()


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"

"""How far one clip is from another: PSNR, SSIM, relative errors, perceptual distance.

Frames are tensors or arrays [F, H, W, C] (one clip) or [B, F, H, W, C] (a batch of clips) with
values in [0, 1]; uint8 frames are divided by 255. A clip that holds a NaN or an infinity scores NaN
in every measure, so that a broken result can never pass for a good one.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Frames = Tensor | NDArray[Any]
else:
    Frames = Any

SSIM_WINDOW, SSIM_SIGMA = 11, 1.5
SSIM_C1, SSIM_C2 = 0.01**2, 0.03**2


def psnr(a: Frames, b: Frames) -> float:
    """Peak signal-to-noise ratio of a clip in dB (mean over clips for a batch); inf if equal."""
    return float(psnr_per_clip(a, b).mean())


def psnr_per_clip(a: Frames, b: Frames) -> Tensor:
    """One PSNR in dB per clip, [B], from the squared error over all its frames."""
    return _decibel(_squared_error(a, b).mean(dim=(1, 2, 3, 4)))


def psnr_per_frame(a: Frames, b: Frames) -> Tensor:
    """One PSNR in dB per frame, [B, F] (or [F] for a single clip)."""
    return _as_given(_decibel(_squared_error(a, b).mean(dim=(2, 3, 4))), a)


def ssim(a: Frames, b: Frames) -> float:
    """Structural similarity of a clip, at most 1 (mean over clips for a batch)."""
    return float(ssim_per_clip(a, b).mean())


def ssim_per_clip(a: Frames, b: Frames) -> Tensor:
    """One SSIM per clip, [B], the mean over its frames."""
    return _ssim(*_pair(a, b)).mean(dim=1)


def ssim_per_frame(a: Frames, b: Frames) -> Tensor:
    """One SSIM per frame, [B, F] (or [F] for a single clip)."""
    return _as_given(_ssim(*_pair(a, b)), a)


def relative_l1(a: Any, b: Any) -> float:
    """Mean |a - b| over mean |b|, for tensors of any one shape; 0 if both are all zero."""
    a, b = _same_shape(a, b)
    return _ratio((a - b).abs().sum(), b.abs().sum())


def relative_l2(a: Any, b: Any) -> float:
    """Norm of a - b over the norm of b, for tensors of any one shape; 0 if both are all zero."""
    a, b = _same_shape(a, b)
    return _ratio(torch.linalg.vector_norm(a - b), torch.linalg.vector_norm(b))


def worst(values: Sequence[float] | Tensor) -> tuple[float, float]:
    """The 5th percentile over clips (linear between ranks) and the minimum; NaN if one is NaN."""
    values = torch.as_tensor(values, dtype=torch.float64).flatten()
    if values.numel() == 0:
        raise ValueError("no values to take the worst of: pass at least one")
    if values.isnan().any():
        return float("nan"), float("nan")
    ranks = values.sort().values
    position = 0.05 * (len(ranks) - 1)
    low, high = ranks[int(position)], ranks[min(int(position) + 1, len(ranks) - 1)]
    share = position - int(position)
    return float(low if share == 0 or low == high else low + share * (high - low)), float(ranks[0])


def perceptual_available() -> bool:
    """Whether the packaged weights of `perceptual_distance` are installed."""
    return find_spec("stlpips_pytorch") is not None


def perceptual_distance(a: Frames, b: Frames) -> float:
    """Shift-tolerant LPIPS (AlexNet), mean over frames and clips: 0 if identical, 0.05 is visible.

    Needs the weights packaged in `stlpips-pytorch`: ImportError without, never a download.
    """
    from diffcache.perceptual import distance

    a, b = _pair(a, b)
    return float(distance(_frames_first(a), _frames_first(b)).mean())


def _pair(a: Frames, b: Frames) -> tuple[Tensor, Tensor]:
    """Both clips as float32 [B, F, H, W, C] in [0, 1]."""
    a, b = _same_shape(a, b)
    if a.ndim not in (4, 5):
        raise ValueError(f"frames must be [F, H, W, C] or [B, F, H, W, C], got {tuple(a.shape)}")
    for name, clip in (("a", a), ("b", b)):
        low, high = clip.nan_to_num(0.0, 0.0, 0.0).aminmax()
        if low < -1e-3 or high > 1 + 1e-3:
            raise ValueError(
                f"{name} must lie in [0, 1], got [{low:.3g}, {high:.3g}]: rescale it first"
            )
    return (a, b) if a.ndim == 5 else (a[None], b[None])


def _same_shape(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    a, b = (_float(x) for x in (a, b))
    if a.shape != b.shape:
        raise ValueError(
            f"both sides must have one shape, got {tuple(a.shape)} and {tuple(b.shape)}"
        )
    if a.numel() == 0:
        raise ValueError(
            f"both sides are empty, got shape {tuple(a.shape)}: pass at least one value"
        )
    return a, b


def _float(x: Any) -> Tensor:
    x = torch.as_tensor(x).detach().cpu()
    return x.float() / 255 if x.dtype == torch.uint8 else x.float()


def _squared_error(a: Frames, b: Frames) -> Tensor:
    a, b = _pair(a, b)
    return (a - b).double().square()


def _decibel(mean_squared_error: Tensor) -> Tensor:
    return torch.where(mean_squared_error.isfinite(), -10 * mean_squared_error.log10(), torch.nan)


def _as_given(values: Tensor, frames: Any) -> Tensor:
    return values if len(frames.shape) == 5 else values[0]


def _ratio(error: Tensor, size: Tensor) -> float:
    if error == 0 and size.isfinite():
        return 0.0
    return float(error / size) if error.isfinite() else float("nan")


def _frames_first(clips: Tensor) -> Tensor:
    """[B, F, H, W, C] -> [B*F, C, H, W]."""
    return clips.flatten(0, 1).movedim(-1, 1)


def _ssim(a: Tensor, b: Tensor) -> Tensor:
    """SSIM [B, F] with a Gaussian window over whole windows only (no padding), data range 1.

    Source: Wang, Bovik, Sheikh, Simoncelli, IEEE Transactions on Image Processing 13(4), 2004.
    """
    if min(a.shape[2:4]) < SSIM_WINDOW:
        raise ValueError(
            f"ssim needs frames of {SSIM_WINDOW}x{SSIM_WINDOW} or more, "
            f"got {a.shape[2]}x{a.shape[3]}"
        )
    x, y = (_frames_first(clips).double().flatten(0, 1)[:, None] for clips in (a, b))
    mean_x, mean_y = _blur(x), _blur(y)
    var_x, var_y = _blur(x * x) - mean_x**2, _blur(y * y) - mean_y**2
    covariance = _blur(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + SSIM_C1) / (mean_x**2 + mean_y**2 + SSIM_C1)
    structure = (2 * covariance + SSIM_C2) / (var_x + var_y + SSIM_C2)
    return (
        (luminance * structure)
        .mean(dim=(1, 2, 3))
        .unflatten(0, (*a.shape[:2], a.shape[-1]))
        .mean(-1)
    )


def _blur(x: Tensor) -> Tensor:
    """Separable Gaussian mean of [N, 1, H, W] over whole windows."""
    taps = torch.arange(SSIM_WINDOW, dtype=x.dtype) - SSIM_WINDOW // 2
    taps = (-(taps**2) / (2 * SSIM_SIGMA**2)).exp()
    taps = taps / taps.sum()
    return F.conv2d(F.conv2d(x, taps[None, None, :, None]), taps[None, None, None, :])

"""The shift-tolerant LPIPS network, run on the weights that `stlpips-pytorch` packages.

Only its weight file is read; the package itself is never imported, because it pulls in torchvision,
IPython and torchsummary. Source: Ghildyal and Liu, arXiv:2207.13686 (the shift-tolerant network);
Zhang et al., arXiv:1801.03924 (the distance).
"""

from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

WEIGHTS = "weights/vST0.0/alex_shift_tolerant.pth"
SMALLEST = 32  # pixels a side: below this the last stage has nothing to pool


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Perceptual distance [N] of frames a and b [N, 3, H, W] in [0, 1]; NaN if not finite."""
    if a.shape[1] != 3 or min(a.shape[2:]) < SMALLEST:
        raise ValueError(
            f"perceptual distance needs RGB frames of at least {SMALLEST}x{SMALLEST}, "
            f"got {tuple(a.shape)}"
        )
    weights = _weights()
    with torch.no_grad():
        pairs = zip(_stages(2 * a - 1, weights), _stages(2 * b - 1, weights), strict=True)
        per_stage = [
            F.conv2d((_unit(x) - _unit(y)) ** 2, weights[f"lin{i}.model.1.weight"]).mean(
                dim=(1, 2, 3)
            )
            for i, (x, y) in enumerate(pairs)
        ]
    return torch.stack(per_stage).sum(0)


@lru_cache(maxsize=1)
def _weights() -> dict[str, Tensor]:
    spec = find_spec("stlpips_pytorch")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "perceptual_distance reads packaged weights: pip install --no-deps stlpips-pytorch"
        )
    path = Path(next(iter(spec.submodule_search_locations))) / WEIGHTS
    return torch.load(path, map_location="cpu", weights_only=True)


def _stages(x: Tensor, weights: dict[str, Tensor]) -> list[Tensor]:
    """The five activations of an AlexNet whose strides are blurred: [N, 64..256, h, w]."""

    def conv(x: Tensor, name: str, padding: int) -> Tensor:
        return F.conv2d(
            x, weights[f"net.{name}.weight"], weights[f"net.{name}.bias"], padding=padding
        )

    x = (x - weights["scaling_layer.shift"]) / weights["scaling_layer.scale"]
    first = _halve(conv(x, "slice1.0", 2), weights["net.slice1.1.filt"]).relu()
    pooled = _halve(F.max_pool2d(first, 3, 1), weights["net.slice2.4.filt"])
    second = conv(pooled, "slice2.5", 2).relu()
    pooled = _halve(F.max_pool2d(second, 3, 1), weights["net.slice3.8.filt"])
    third = conv(pooled, "slice3.9", 1).relu()
    fourth = conv(third, "slice4.11", 1).relu()
    return [first, second, third, fourth, conv(fourth, "slice5.13", 1).relu()]


def _halve(x: Tensor, kernel: Tensor) -> Tensor:
    """Blur with a 3x3 kernel and keep every second pixel, reflecting two pixels at each border."""
    return F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), kernel, stride=2, groups=x.shape[1])


def _unit(x: Tensor) -> Tensor:
    """Channel vectors scaled to length 1."""
    return x / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + 1e-10)

"""Reads colour, shape, direction and background off a clip's pixels, without knowing the prompt.

Frames are [17, 3, 64, 64] in [0, 1]. A pixel belongs to the nearest of the six shape colours or to
a background, whose colour may be brighter or darker (gradients). A colour that fills enough pixels
is a thing; its outline is compared with drawn templates of all sizes, its path with the four
directions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from samples.train.clips import (
    BACKGROUNDS,
    COLOURS,
    DIRECTIONS,
    SHAPES,
    SIZE,
    Scene,
    Thing,
    distance,
)

MIN_PIXELS = 55.0  # the smallest ring drawn covers 150
MIN_TRAVEL = 6.0
MIN_OVERLAP = 0.5  # below it no template fits: fragments, or the same thing twice
RADII = torch.arange(6.5, 15.0, 0.5)


@dataclass(frozen=True, slots=True)
class Reading:
    """Things seen, from the largest area down, and the overlap of each with its best template."""

    things: tuple[Thing, ...]
    background: str
    overlap: tuple[float, ...]


def to_line(pixels: Tensor, colour: Tensor) -> Tensor:
    """Distance of pixels [..., 3] to the darker and brighter versions of a colour [3]."""
    scale = (pixels @ colour / colour.square().sum()).clamp(0.6, 1.4)
    return (pixels - scale[..., None] * colour).norm(dim=-1)


def label(frames: Tensor) -> tuple[Tensor, str]:
    """Nearest shape colour of each pixel [17, 64, 64], -1 for background; the background's name."""
    pixels = frames.movedim(1, -1)
    grounds = torch.stack([to_line(pixels, torch.tensor(c)) for c in BACKGROUNDS.values()])
    best = int(grounds.clamp(max=0.2).mean(dim=(1, 2, 3)).argmin())
    colours = torch.stack([(pixels - torch.tensor(c)).norm(dim=-1) for c in COLOURS.values()])
    nearest, index = colours.min(dim=0)
    return torch.where(nearest < grounds[best], index, -1), list(BACKGROUNDS)[best]


def centroids(mask: Tensor) -> Tensor:
    """Centres (x, y) [T, 2] of masks [T, 64, 64]."""
    axis = torch.arange(SIZE, dtype=torch.float32)
    area = mask.sum(dim=(1, 2)).clamp(min=1e-6)
    x = (mask.sum(dim=1) * axis).sum(dim=1) / area
    y = (mask.sum(dim=2) * axis).sum(dim=1) / area
    return torch.stack([x, y], dim=1)


def direction(mask: Tensor) -> str:
    """The direction of the centroid's path, or "still"."""
    path = centroids(mask)[mask.sum(dim=(1, 2)) > MIN_PIXELS / 2]
    if len(path) < 6:
        return "still"
    shift = path[-3:].mean(dim=0) - path[:3].mean(dim=0)
    if shift.abs().max() < MIN_TRAVEL:
        return "still"
    scores = {name: float(shift @ torch.tensor(unit)) for name, unit in DIRECTIONS.items()}
    return max(scores, key=scores.__getitem__)


def shape(mask: Tensor) -> tuple[str, float]:
    """The template with the largest mean overlap (IoU) with masks [T, 64, 64], and that overlap.

    The name is "unclear" where no template fits.
    """
    axis = torch.arange(SIZE, dtype=torch.float32)
    centre = centroids(mask)[:, None, :, None, None]
    x = axis[None, :] - centre[:, :, 0]
    y = axis[:, None] - centre[:, :, 1]
    radius = RADII[None, :, None, None]
    scores = {}
    for name in SHAPES:
        drop = 0.083 * radius if name == "triangle" else 0.0
        template = (distance(name, x, y + drop, radius) < 0).float()
        both = (template * mask[:, None]).sum(dim=(2, 3))
        either = template.sum(dim=(2, 3)) + mask.sum(dim=(1, 2))[:, None] - both
        scores[name] = float((both / either).mean(dim=0).max())
    best = max(scores, key=scores.__getitem__)
    return best if scores[best] >= MIN_OVERLAP else "unclear", scores[best]


def read(frames: Tensor) -> Reading:
    """Everything the oracle sees in one clip [17, 3, 64, 64]."""
    labels, background = label(frames)
    masks = {name: (labels == i).float() for i, name in enumerate(COLOURS)}
    areas = {name: float(mask.sum()) / len(mask) for name, mask in masks.items()}
    found = [
        name
        for name in sorted(areas, key=areas.__getitem__, reverse=True)
        if areas[name] > MIN_PIXELS
    ]
    shapes = [shape(masks[name][::4]) for name in found]
    things = (Thing(n, s, direction(masks[n])) for n, (s, _) in zip(found, shapes, strict=True))
    return Reading(tuple(things), background, tuple(round(overlap, 3) for _, overlap in shapes))


def grade(reading: Reading, scene: Scene) -> dict[str, float]:
    """Share of the things whose colour, shape, direction were found; background; count."""
    seen = {thing.colour: thing for thing in reading.things[: len(scene.things)]}
    pairs = [(thing, seen.get(thing.colour)) for thing in scene.things]
    if len(pairs) == 1 and reading.things:
        pairs = [(scene.things[0], reading.things[0])]
    marks = {
        name: sum(
            got is not None and getattr(got, name) == getattr(want, name) for want, got in pairs
        )
        / len(pairs)
        for name in ("colour", "shape", "direction")
    }
    count = float(len(reading.things) == len(scene.things))
    return {**marks, "background": float(reading.background == scene.background), "count": count}

"""Procedural clips: one or two flat shapes gliding over a soft gradient, and the sentence for them.

A clip is a float tensor [17, 3, 64, 64] in [-1, 1]. Everything is drawn from one
`torch.Generator`, so a seed fixes it. Some (colour, shape, direction, background) combinations
are never drawn for training; see `held_out`.
"""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

FRAMES, SIZE = 17, 64
COLOURS = {
    "red": (0.90, 0.14, 0.14),
    "green": (0.16, 0.80, 0.22),
    "blue": (0.20, 0.36, 0.96),
    "yellow": (0.96, 0.86, 0.16),
    "purple": (0.74, 0.24, 0.86),
    "white": (0.95, 0.95, 0.95),
}
BACKGROUNDS = {
    "grey": (0.46, 0.46, 0.46),
    "black": (0.07, 0.07, 0.07),
    "navy": (0.09, 0.12, 0.32),
    "brown": (0.36, 0.23, 0.13),
    "teal": (0.07, 0.34, 0.34),
}
SHAPES = ("circle", "square", "triangle", "ring")
DIRECTIONS = {"left": (-1.0, 0.0), "right": (1.0, 0.0), "up": (0.0, -1.0), "down": (0.0, 1.0)}


@dataclass(frozen=True, slots=True)
class Thing:
    """What the sentence says about one shape."""

    colour: str
    shape: str
    direction: str

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape} moving {self.direction}"


@dataclass(frozen=True, slots=True)
class Scene:
    """One or two things on a background."""

    things: tuple[Thing, ...]
    background: str

    @property
    def prompt(self) -> str:
        return f"{' and '.join(map(str, self.things))} on a {self.background} background"


def held_out(thing: Thing, background: str) -> bool:
    """True for about one combination in seven; training never shows those."""
    index = (
        list(COLOURS).index(thing.colour)
        + 2 * SHAPES.index(thing.shape)
        + 3 * list(DIRECTIONS).index(thing.direction)
        + 5 * list(BACKGROUNDS).index(background)
    )
    return index % 7 == 3


def held_out_scenes() -> list[Scene]:
    """All single-shape scenes that training never shows, in a fixed shuffled order."""
    combos = product(COLOURS, SHAPES, DIRECTIONS, BACKGROUNDS)
    scenes = [Scene((Thing(c, s, d),), b) for c, s, d, b in combos if held_out(Thing(c, s, d), b)]
    order = torch.randperm(len(scenes), generator=torch.Generator().manual_seed(0))
    return [scenes[i] for i in order]


def pick(options: object, generator: torch.Generator) -> str:
    names = list(options)
    return names[int(torch.randint(len(names), (1,), generator=generator))]


def draw_scene(generator: torch.Generator, *, pairs: float = 0.3) -> Scene:
    """A random training scene; a share `pairs` of them has two shapes of different colours."""
    while True:
        background = pick(BACKGROUNDS, generator)
        count = 1 + int(torch.rand((), generator=generator) < pairs)
        things = tuple(
            Thing(pick(COLOURS, generator), pick(SHAPES, generator), pick(DIRECTIONS, generator))
            for _ in range(count)
        )
        distinct = len({thing.colour for thing in things}) == count
        if distinct and not any(held_out(thing, background) for thing in things):
            return Scene(things, background)


def uniform(low: float, high: float, generator: torch.Generator) -> float:
    return low + (high - low) * float(torch.rand((), generator=generator))


def draw_path(direction: str, radius: float, generator: torch.Generator) -> Tensor:
    """Centres [17, 2] (x, y) of a straight glide that stays inside the frame."""
    travel = uniform(18.0, 30.0, generator)
    along = torch.tensor(DIRECTIONS[direction])
    across = torch.tensor([along[1], along[0]]) * uniform(-0.12, 0.12, generator)
    shift = (along + across) * travel
    low = radius + 1.0 - shift.clamp(max=0.0)
    high = SIZE - 2.0 - radius - shift.clamp(min=0.0)
    start = low + (high - low) * torch.rand(2, generator=generator)
    return start + torch.linspace(0, 1, FRAMES)[:, None] * shift


def distance(shape: str, x: Tensor, y: Tensor, radius: float) -> Tensor:
    """Signed distance in pixels to the shape's outline, negative inside; any shape of x and y."""
    if shape == "circle":
        return torch.hypot(x, y) - radius
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - 0.88 * radius
    if shape == "triangle":
        slanted = 0.866 * x.abs() - 0.5 * (y + 0.15 * radius) - 0.5 * radius
        return torch.maximum(slanted, y + 0.15 * radius - 0.85 * radius)
    return (torch.hypot(x, y) - 0.75 * radius).abs() - 0.25 * radius


def coverage(shape: str, path: Tensor, radius: float) -> Tensor:
    """Anti-aliased mask [17, 64, 64] in [0, 1] of a shape along a path [17, 2]."""
    axis = torch.arange(SIZE, dtype=torch.float32)
    x = axis[None, None, :] - path[:, 0, None, None]
    y = axis[None, :, None] - path[:, 1, None, None]
    return (0.5 - distance(shape, x, y, radius)).clamp(0, 1)


def gradient(colour: tuple[float, float, float], generator: torch.Generator) -> Tensor:
    """A still background [3, 64, 64]: the colour under a soft linear ramp of random direction."""
    angle = uniform(0.0, 6.2832, generator)
    axis = torch.linspace(-1, 1, SIZE)
    ramp = (
        torch.cos(torch.tensor(angle)) * axis[None, :]
        + torch.sin(torch.tensor(angle)) * axis[:, None]
    )
    return torch.tensor(colour)[:, None, None] * (1.0 + uniform(0.1, 0.3, generator) * ramp)


def lay_out(scene: Scene, generator: torch.Generator) -> list[tuple[Thing, float, Tensor]]:
    """Sizes and paths; two shapes never touch (the scene is drawn again until they do not)."""
    low, high = (9.0, 13.0) if len(scene.things) == 1 else (8.0, 10.0)
    while True:
        radii = [uniform(low, high, generator) for _ in scene.things]
        paths = [
            draw_path(t.direction, r, generator) for t, r in zip(scene.things, radii, strict=True)
        ]
        if len(paths) == 1 or (paths[0] - paths[1]).norm(dim=-1).min() > 1.15 * sum(radii) + 1:
            return list(zip(scene.things, radii, paths, strict=True))


def render(scene: Scene, generator: torch.Generator) -> Tensor:
    """Frames [17, 3, 64, 64] in [-1, 1] of a scene."""
    frames = gradient(BACKGROUNDS[scene.background], generator).expand(FRAMES, -1, -1, -1)
    for thing, radius, path in lay_out(scene, generator):
        jitter = 0.03 * (2 * torch.rand(3, generator=generator) - 1)
        colour = (torch.tensor(COLOURS[thing.colour]) + jitter)[:, None, None]
        mask = coverage(thing.shape, path, radius)[:, None]
        frames = frames + mask * (colour - frames)
    return frames.clamp(0, 1) * 2 - 1


def draw_clips(count: int, seed: int, *, pairs: float = 0.3) -> tuple[Tensor, list[str]]:
    """A batch of training clips [count, 3, 17, 64, 64] and their sentences."""
    generator = torch.Generator().manual_seed(seed)
    scenes = [draw_scene(generator, pairs=pairs) for _ in range(count)]
    frames = torch.stack([render(scene, generator) for scene in scenes])
    return frames.transpose(1, 2).contiguous(), [scene.prompt for scene in scenes]

"""The arguments of a pipeline's call, from what was asked for and what the pipeline takes."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any

# What a pipeline may call an option; the first name that it takes is used.
NAMES = {
    "steps": ("num_inference_steps",),
    "guidance": ("guidance_scale",),
    "height": ("height",),
    "width": ("width",),
    "frames": ("num_frames", "video_length"),
    "fps": ("frame_rate", "fps"),
    "negative": ("negative_prompt",),
}
DEMO_NAMES = (
    "num_inference_steps",
    "guidance_scale",
    "height",
    "width",
    "num_frames",
    "max_sequence_length",
)
DEMO_FPS, FPS = 8.0, 16.0  # of the demo model's clips; of Wan's, where a pipeline does not say


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for; None leaves it to the pipeline."""

    steps: int | None = None
    guidance: float | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    fps: float | None = None
    negative: str | None = None

    def __post_init__(self) -> None:
        if self.guidance is not None and not isfinite(self.guidance):
            raise ValueError(f"--guidance must be a finite number, got {self.guidance}")

    def given(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Call:
    """`arguments` of every call (without prompt and generator), and what is known beforehand.

    Attributes:
        takes: the names of all parameters of the call.
        video: whether frames come out, not images.
    """

    arguments: dict[str, Any]
    takes: frozenset[str]
    fps: float
    video: bool

    @classmethod
    def plan(cls, pipeline: type, options: Options, folder: Path | None) -> "Call":
        """How to call this pipeline class; a demo model's folder brings defaults of its own.

        Raises:
            ValueError: an option that it does not take, or an input that we cannot give.
        """
        takes = inspect.signature(pipeline.__call__).parameters
        check_inputs(pipeline, takes)
        defaults = demo_defaults(folder)
        asked = _named(pipeline, options.given(), takes)
        arguments = {name: v for name, v in {**defaults, **asked}.items() if name in takes}
        if "output_type" in takes:
            arguments["output_type"] = "np"
        return cls(
            arguments=arguments,
            takes=frozenset(takes),
            fps=options.fps or (DEMO_FPS if defaults else _own_rate(takes)),
            video=is_video(takes),
        )


def demo_defaults(folder: Path | None) -> dict[str, Any]:
    """What the demo.json of a model's folder says of its size, steps and guidance."""
    path = None if folder is None else folder / "demo.json"
    if path is None or not path.is_file():
        return {}
    known = json.loads(path.read_text(encoding="utf-8"))
    return {name: known[name] for name in DEMO_NAMES if name in known}


def check_inputs(pipeline: type, takes: Mapping[str, inspect.Parameter]) -> None:
    """Raises ValueError unless a prompt and a generator are all that a call needs."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [n for n, p in takes.items() if p.default is p.empty and p.kind in named]
    missing = [name for name in needed if name not in ("self", "prompt")]
    if missing:
        raise ValueError(
            f"{pipeline.__name__} needs {', '.join(missing)}, which this command cannot give: "
            "call it from Python, with diffcache.wrap"
        )
    absent = [name for name in ("prompt", "generator") if name not in takes]
    if absent:
        raise ValueError(
            f"{pipeline.__name__} takes no {' and no '.join(absent)}: "
            "call it from Python, with diffcache.wrap"
        )


def is_video(takes: Mapping[str, Any]) -> bool:
    """Whether a call with these parameters makes a video; else it makes an image."""
    return any("frame" in name or name in ("video_length", "video") for name in takes)


def _named(pipeline: type, given: Mapping[str, Any], takes: Mapping[str, Any]) -> dict[str, Any]:
    """The options under the pipeline's names; the frame rate is passed on only where it is taken.

    Raises:
        ValueError: options that the pipeline does not take, all of them in one message.
    """
    named = {o: next((n for n in NAMES[o] if n in takes), None) for o in given}
    refused = [f"--{option}" for option, name in named.items() if name is None and option != "fps"]
    if refused:
        known = [f"--{o}" for o, names in NAMES.items() if any(n in takes for n in names)]
        raise ValueError(
            f"{pipeline.__name__} takes no {', '.join(refused)}: leave it out "
            f"(it takes {', '.join(known)})"
        )
    return {name: given[option] for option, name in named.items() if name is not None}


def _own_rate(takes: Mapping[str, inspect.Parameter]) -> float:
    rates = [takes[name].default for name in NAMES["fps"] if name in takes]
    return float(next((rate for rate in rates if isinstance(rate, (int, float))), FPS))

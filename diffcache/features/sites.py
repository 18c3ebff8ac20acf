"""Sites: what is skipped. Each names the runs of blocks that one decision replaces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from ..parts import check_count
from .base import Part, part


@dataclass(frozen=True, kw_only=True)
class Site(Part):
    """Base of the sites."""

    blocks: ClassVar[bool] = True
    per_block: ClassVar[bool] = False

    def span(self, num_blocks: int) -> range:
        """The blocks that may be skipped, of those that one forward runs, in call order."""
        return range(num_blocks)


@part("site")
@dataclass(frozen=True, kw_only=True)
class Model(Site):
    """The denoiser's output, or (form "residual") its difference from the noisy input."""

    blocks: ClassVar[bool] = False
    form: Literal["output", "residual"] = "output"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form not in ("output", "residual"):
            raise ValueError(f"form must be 'output' or 'residual', got {self.form!r}")


@part("site")
@dataclass(frozen=True, kw_only=True)
class Stack(Site):
    """All blocks but the first `front` and the last `back`, as residuals (out - in)."""

    front: int = 0
    back: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("front", self.front, 0)
        check_count("back", self.back, 0)

    def span(self, num_blocks: int) -> range:
        if self.front + self.back >= num_blocks:
            raise ValueError(
                f"front + back must be below the number of blocks ({num_blocks}), "
                f"got {self.front + self.back}: give fewer, as in front=1, back=0"
            )
        return range(self.front, num_blocks - self.back)


@part("site")
@dataclass(frozen=True, kw_only=True)
class Span(Site):
    """Blocks `start` up to but not including `end`; a negative end counts from the last block."""

    start: int = 1
    end: int = -1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("start", self.start, 0)

    def span(self, num_blocks: int) -> range:
        end = self.end if self.end >= 0 else num_blocks + self.end
        if not self.start < end <= num_blocks:
            raise ValueError(
                f"span must lie within the {num_blocks} blocks, "
                f"got start {self.start}, end {self.end}"
            )
        return range(self.start, end)


@part("site")
@dataclass(frozen=True, kw_only=True)
class Block(Site):
    """Every block by itself, each with its own decision; the first `anchor` are always computed."""

    per_block: ClassVar[bool] = True
    anchor: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("anchor", self.anchor, 0)

    def span(self, num_blocks: int) -> range:
        if self.anchor >= num_blocks:
            raise ValueError(
                f"anchor must be below the number of blocks ({num_blocks}), got {self.anchor}"
            )
        return range(self.anchor, num_blocks)

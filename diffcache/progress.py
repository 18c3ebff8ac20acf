"""Which run of a pipeline, and which chunk of it, a call belongs to, where the pipeline tells."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .hooks import CallHook, InstancePatch


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkRule:
    """What a pipeline class does where a run, and where a chunk begins.

    Attributes:
        run: its method that is called once, before the first chunk.
        chunk: its method that is called once for each chunk, before that chunk's first step.
        after_write: instead, the first step after a pass that wrote keys and values.
        told: instead, the chunk's index read off the denoiser's arguments by name.
        masked: tokens that are held back are given a share of the step's time: the highest is it.
    """

    run: str
    chunk: str | None = None
    after_write: bool = False
    told: Callable[[Mapping[str, Any]], int | None] | None = None
    masked: bool = False

    def __post_init__(self) -> None:
        if (self.chunk is not None) + self.after_write + (self.told is not None) != 1:
            raise ValueError("exactly one of chunk, after_write and told says where chunks begin")


class Progress:
    """What was heard of one denoiser's pipeline.

    Attributes:
        run: one object for each run; None outside a run, and where no pipeline tells.
        chunk: index within the run; None before the first chunk.
    """

    def __init__(self) -> None:
        self.run: object | None = None
        self.chunk: int | None = None
        self._rule: ChunkRule | None = None
        self._wrote = False

    def begin_run(self, run: object, rule: ChunkRule) -> None:
        self.run, self._rule = run, rule
        self.chunk, self._wrote = None, False

    def begin_chunk(self) -> None:
        """Counts on; outside a run (the method is called by hand) there are no chunks."""
        if self.run is not None:
            self.chunk = 0 if self.chunk is None else self.chunk + 1

    def end_run(self) -> None:
        self.run = self.chunk = self._rule = None

    @property
    def masked(self) -> bool:
        """Whether the highest of several timesteps is the step's."""
        return self._rule is not None and self._rule.masked

    def hear(self, arguments: Mapping[str, Any], wrote: bool) -> None:
        """One call of the denoiser: its arguments by name; whether it writes keys and values."""
        if self._rule is None:
            return
        if self._rule.told is not None:
            self.chunk = self._rule.told(arguments)
        elif self._rule.after_write and self._wrote and not wrote:
            self.begin_chunk()
        self._wrote = wrote


class Heard:
    """A method of one pipeline instance, after each call of which something is told.

    Args:
        then: called without arguments once the method has returned.
    """

    def __init__(self, owner: Any, name: str, then: Callable[[], None]) -> None:
        def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            then()
            return result

        self.hook = CallHook(getattr(owner, name), call)
        self.patch = InstancePatch(owner, name, self.hook)

    def remove(self) -> None:
        """Takes it off again; under a hook put on later it only passes on."""
        self.hook.handler = None
        self.patch.remove()


def listen(
    pipeline: Any, rule: ChunkRule, progresses: Callable[[Any], Iterable[Progress]]
) -> list[Heard]:
    """Tells the progress of a pipeline's denoisers (weakly held) where runs and chunks begin."""
    reference = weakref.ref(pipeline)

    def begin_run() -> None:
        run = object()
        for progress in progresses(reference()):
            progress.begin_run(run, rule)

    def begin_chunk() -> None:
        for progress in progresses(reference()):
            progress.begin_chunk()

    heard = [Heard(pipeline, rule.run, begin_run)]
    return heard if rule.chunk is None else [*heard, Heard(pipeline, rule.chunk, begin_chunk)]

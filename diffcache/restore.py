"""Puts wrapping back as it was after a measurement that wraps with policies of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import api


@contextmanager
def wrapping_restored(pipe: Any) -> Iterator[None]:
    """Within, `pipe` may be wrapped at will; after it, every denoiser is as before.

    That is: its own policy, as strict as it was, and no hook where there was none.
    """
    denoisers = api._denoisers(pipe)
    before = {name: api._state(module) for name, module in denoisers.items()}
    settings = {
        name: (state.name, state.policy, state.strict, state.clock.pipelines)
        for name, state in before.items()
        if state is not None
    }
    watched = pipe.__dict__.get(api.PIPELINE_ATTRIBUTE)
    modules = None if watched is None else dict(watched.modules)
    try:
        yield
    finally:
        for name, module in denoisers.items():
            if before[name] is None:
                api.unwrap(module)
        for name, (own, policy, strict, pipelines) in settings.items():
            api._install({own: denoisers[name]}, {own: policy}, strict)
            state = api._state(denoisers[name])
            if state is not None:
                state.name, state.clock.pipelines = own, pipelines
        if watched is None:
            api._unwatch(pipe)
        elif modules is not None:
            watched.modules = modules

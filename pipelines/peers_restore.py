"""Puts a pipeline back exactly as it was, whatever another library wrote on it meanwhile."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .denoisers import denoisers

Kept = tuple[dict[str, Any], dict[str, Any], list[tuple[Any, Any]]]


@contextmanager
def restored(pipe: Any) -> Iterator[None]:
    """Within, `pipe` has a class of its own; afterwards its attributes are those of before.

    What is put back: the class, and the attributes of the pipeline, of its denoisers, of every
    module below them and of their diffusers hook registries, with the dicts and lists that they
    hold directly. A library that writes on `pipe.__class__` (cache-dit does, to replace the call)
    then writes on a throwaway subclass, so other pipelines of the class are never touched.
    """
    original = type(pipe)
    kept = [_keep(vars(owner)) for owner in _owners(pipe)]
    pipe.__class__ = _throwaway(original)
    try:
        yield
    finally:
        pipe.__class__ = original
        for state in kept:
            _put_back(*state)


def _throwaway(original: type) -> type:
    """An equal subclass under the same name, as libraries go by the names of classes."""
    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (original,), {**names, "__doc__": original.__doc__})


def _owners(pipe: Any) -> Iterator[Any]:
    yield pipe
    for denoiser in denoisers(pipe).values():
        for module in denoiser.modules():
            yield module
            if "_diffusers_hook" in vars(module):
                yield vars(module)["_diffusers_hook"]


def _keep(attributes: dict[str, Any]) -> Kept:
    """The dict itself, a copy of it, and each dict and list in it with a copy."""
    held = [value for value in attributes.values() if type(value) in (dict, OrderedDict, list)]
    return attributes, dict(attributes), [(value, value.copy()) for value in held]


def _put_back(
    attributes: dict[str, Any], before: dict[str, Any], held: list[tuple[Any, Any]]
) -> None:
    attributes.clear()
    attributes.update(before)
    for value, copy in held:
        value.clear()
        value.extend(copy) if isinstance(value, list) else value.update(copy)

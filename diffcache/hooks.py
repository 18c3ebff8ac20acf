"""Puts names into the `__dict__` of single instances and takes them out again, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

_ABSENT = object()
Named = (
    tuple[str, dict[str, Any]] | None
)  # what a pipeline says of a call: branch name, step, sigma


class InstancePatch:
    """One name that stands in an instance's `__dict__` for as long as the patch does."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner, self.name, self.value = owner, name, value
        self.saved = owner.__dict__.get(name, _ABSENT)
        owner.__dict__[name] = value

    def remove(self) -> bool:
        """Puts back what stood there; False where something else has been put on top since."""
        if self.owner.__dict__.get(self.name) is not self.value:
            return False
        if self.saved is _ABSENT:
            del self.owner.__dict__[self.name]
        else:
            self.owner.__dict__[self.name] = self.saved
        return True


class ForwardHook:
    """Stands in for `forward` on one instance; without a handler it only passes on.

    `original` is what `module.forward` was before: a bound method, or another hook's function.
    """

    __slots__ = ("__weakref__", "__wrapped__", "handler", "original")
    _torchdynamo_disable = (
        True  # compiled callers break the graph here instead of tracing our state
    )

    def __init__(self, original: Callable[..., Any], handler: Callable[..., Any]) -> None:
        self.original = self.__wrapped__ = original
        self.handler: Callable[..., Any] | None = handler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.handler is None:
            return self.original(*args, **kwargs)
        return self.handler(self.original, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied module is not wrapped: its forward is its own, not the original module's."""
        if isinstance(self.original, MethodType):
            owner = memo.get(id(self.original.__self__))
            if owner is not None:
                return MethodType(self.original.__func__, owner)
        raise TypeError(
            "this module is wrapped by diffcache on top of another hook: unwrap it before copying"
        )


class InstalledForward:
    """A `ForwardHook` on a module, removed without a trace even from under hooks put on later."""

    def __init__(self, module: Any, handler: Callable[..., Any]) -> None:
        self.module = module
        self.hook = ForwardHook(module.forward, handler)
        self.patch = InstancePatch(module, "forward", self.hook)

    def remove(self) -> None:
        self.hook.handler = None
        if not self.patch.remove():
            self._replace_below()

    def _replace_below(self) -> None:
        """accelerate and diffusers keep what they cover under these names."""
        original = self.hook.original
        for holder in [self.module, *_diffusers_functions(self.module)]:
            for name in ("_old_forward", "forward", "original_forward"):
                if holder.__dict__.get(name) is self.hook:
                    holder.__dict__[name] = original


def _diffusers_functions(module: Any) -> Iterator[Any]:
    registry = module.__dict__.get("_diffusers_hook")
    yield from getattr(registry, "_fn_refs", [])


class NamedContext:
    """Shadows `cache_context` on one denoiser, so that the pipeline's own words are heard."""

    def __init__(self, module: Any, heard: Callable[[Named], Named]) -> None:
        original = module.cache_context

        @contextmanager
        def cache_context(name: str, **kwargs: Any) -> Iterator[None]:
            before = heard((name, kwargs))
            try:
                with original(name, **kwargs):
                    yield
            finally:
                heard(before)

        self.patch = InstancePatch(module, "cache_context", cache_context)

    def remove(self) -> None:
        self.patch.remove()

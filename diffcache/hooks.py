"""Puts names into the `__dict__` of single instances and takes them out again, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch.compiler import is_compiling

_ABSENT = object()
# In the names of the hooks that diffusers' own caches put on modules.
CACHE_WORDS = ("cache", "fbc_", "pyramid_attention_broadcast")
COMPILED = "_compiled_call_impl"  # where torch.nn.Module.compile puts what it made
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


class Hook:
    """A callable that stands in for a method on one instance.

    `original` is what was found before: a bound method, or another hook's function. Copies and
    pickles of the instance are not wrapped: there the original method of the copy takes its place.
    """

    __slots__ = ("__weakref__", "__wrapped__", "handler", "original", "passing")

    def __init__(self, original: Callable[..., Any], handler: Callable[..., Any] | None) -> None:
        self.original = self.__wrapped__ = original
        self.handler = handler
        self.passing = False  # for a while: pass on without asking the handler

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.original, MethodType):
            return getattr, (self.original.__self__, self.original.__name__)
        return _same, (self.original,)


def _same(value: Any) -> Any:
    return value


class CallHook(Hook):
    """Stands in for `forward` or `compile`; without a handler it only passes on."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A graph traced from outside cannot hold our state: it gets the plain forward.
        if self.handler is None or self.passing or is_compiling():
            return self.original(*args, **kwargs)
        return self.handler(self.original, args, kwargs)


class ContextHook(Hook):
    """Stands in for diffusers' `cache_context`, so that the pipeline's own words are heard."""

    __slots__ = ()

    @contextmanager
    def __call__(self, name: str, **kwargs: Any) -> Iterator[None]:
        handler = self.handler or _same
        before = handler((name, kwargs))
        try:
            with self.original(name, **kwargs):
                yield
        finally:
            handler(before)


class InstalledForward:
    """A `CallHook` on a module, removed without a trace even from under hooks put on later.

    After `module.compile()`, before or after us, the handler stands outside the compiled graph.

    Args:
        may_compile: called before the module is compiled as a whole; raises if it must not be.
    """

    def __init__(
        self, module: Any, handler: Callable[..., Any], may_compile: Callable[[], None]
    ) -> None:
        self.module, self.handler, self.may_compile = module, handler, may_compile
        self.hook = CallHook(module.forward, handler)
        self.patches = [
            InstancePatch(module, "forward", self.hook),
            InstancePatch(module, "compile", CallHook(module.compile, self._compile)),
        ]
        if module.__dict__.get(COMPILED) is not None:
            self._cover_compiled()

    def reachable(self) -> bool:
        """Whether a call of the module still comes to our hook, at the top or under others."""
        holders = [self.module, *_diffusers_functions(self.module)]
        names = ("_old_forward", "forward", "original_forward")
        return any(holder.__dict__.get(name) is self.hook for holder in holders for name in names)

    def remove(self) -> None:
        self.hook.handler = None
        for patch in reversed(self.patches):
            if not patch.remove() and patch.name == "forward":
                self._replace_below()

    def _compile(self, original: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Around `module.compile`, which by itself would trace our state into the graph."""
        self.may_compile()
        original(*args, **kwargs)
        self._cover_compiled()

    def _cover_compiled(self) -> None:
        compiled = self.module.__dict__[COMPILED]

        def original(*args: Any, **kwargs: Any) -> Any:
            self.hook.passing = True
            try:
                return compiled(*args, **kwargs)
            finally:
                self.hook.passing = False

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.handler(original, args, kwargs)

        self.patches.append(InstancePatch(self.module, COMPILED, call))

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


def foreign_cache(module: Any) -> str | None:
    """The name of a hook with which a cache of diffusers works in this module, or None."""
    for part in module.modules():
        hooks = getattr(part.__dict__.get("_diffusers_hook"), "hooks", ())
        for name in hooks:
            if any(word in name for word in CACHE_WORDS):
                return str(name)
    return None


class InstalledRefusal:
    """Stands in for `enable_cache`: two caches at work would each spoil what the other keeps.

    Args:
        remedy: the text of the ValueError raised where the method is called.
    """

    def __init__(self, module: Any, remedy: str) -> None:
        def refuse(*_: Any) -> None:
            raise ValueError(remedy)

        self.hook = CallHook(module.enable_cache, refuse)
        self.patch = InstancePatch(module, "enable_cache", self.hook)

    def remove(self) -> None:
        self.hook.handler = None
        self.patch.remove()


class InstalledContext:
    """A `ContextHook` on a module that has a `cache_context`."""

    def __init__(self, module: Any, heard: Callable[[Named], Named]) -> None:
        self.hook = ContextHook(module.cache_context, heard)
        self.patch = InstancePatch(module, "cache_context", self.hook)

    def remove(self) -> None:
        self.hook.handler = None
        self.patch.remove()

"""wrap, unwrap, reset, report, disabled, chunk, kv_write: the front door."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from . import llm
from .denoiser import ATTRIBUTE, Denoiser, refuse_double
from .errors import DiffcacheError, DiffcacheWarning
from .hooks import CallHook, InstancePatch
from .policy import Policy
from .progress import Heard, Progress, listen
from .records import Report
from .registry import get_policy

PolicyLike = str | Path | Policy
COVERED = (
    "a denoiser was put under torch.compile after wrap, so nothing is cached: wrap again "
    "(or use denoiser.compile(), which needs no second wrap)"
)
EXCHANGED = "{} was exchanged after wrap, so nothing of it is cached: wrap the pipeline again"
PIPELINE_ATTRIBUTE = "_diffcache_pipeline"


def wrap(
    target: Any,
    policy: PolicyLike | Mapping[str, PolicyLike] = "balanced",
    *,
    strict: bool = False,
    **overrides: Any,
) -> Any:
    """Makes a pipeline or a denoiser reuse what it computed before, an LLM keep less; in place.

    Args:
        target: a diffusers pipeline (all its denoisers are wrapped), a denoiser, any module with a
            timestep, a language model of transformers (the policy is then a `kv.KVPolicy` or its
            name), or a class: then a factory with the class's constructors is returned.
        policy: a name (`diffcache.policies()`), a `Policy`, the path of one, or a mapping from
            denoiser names ("transformer_2") to any of these.
        strict: raise where a run would only have said that it skipped nothing.
        overrides: settings of the policy's parts by name (`threshold=0.1`), or whole parts
            (`site="model"`).

    Returns:
        `target` itself, or the factory.

    Raises:
        ValueError: unknown policy or setting, nothing to wrap, or another cache is already at work.
    """
    if isinstance(target, type):
        return WrappedClass(target, policy, strict, overrides)
    if llm.is_llm(target):
        return llm.wrap(target, policy, strict, overrides)
    found = _denoisers(target)
    policies = {
        name: chosen.for_model(_family(target, name, found[name]))
        for name, chosen in _policies(found, policy, overrides).items()
    }
    _install({name: found[name] for name in policies}, policies, strict)
    if not isinstance(target, nn.Module):
        states = {name: state for name in found if (state := _state(found[name])) is not None}
        for name, state in states.items():
            state.name = name  # one wrapped by itself before went by its class
        _watch(target, list(states.values()))
    return target


def unwrap(target: Any) -> Any:
    """Takes everything off again, as if it had never been there; returns `target`."""
    if llm.is_llm(target):
        return llm.unwrap(target)
    for module in _denoisers(target, wrapped_only=True).values():
        state = _state(module)
        if state is not None:
            state.remove()
    _unwatch(target)
    return target


def reset(target: Any) -> None:
    """Drops all history and rows; the next call begins a new trajectory."""
    if llm.is_llm(target):
        return llm.state(target).reset()
    for state in _states(target):
        state.reset()


def report(target: Any) -> Report:
    """What the last run computed, reused and saved, and why; of an LLM a `kv.KVReport`.

    Raises:
        ValueError: `target` is not wrapped.
        DiffcacheError: with strict, the last run skipped nothing.
    """
    if llm.is_llm(target):
        return llm.state(target).report()
    states = _states(target)
    for state in states:
        _complain(state, raising_only=True)
    # An expert that was not called in the last run still has the rows of an older one.
    latest = max((state.recorder for state in states), key=lambda recorder: recorder.begun).token
    current = [state for state in states if state.recorder.token is latest]
    modules = {
        state.name: {
            "policy": state.policy.name,
            "site": state.policy.site.kind,
            "hooked": state.site.hooked,
            "bytes_peak": state.store.bytes_peak,
            "bytes_held": state.store.bytes_held,
        }
        for state in states
    }
    names = dict.fromkeys(state.policy.name for state in states)
    return Report(", ".join(names), modules, {state.name: state.recorder for state in current})


@contextmanager
def disabled(target: Any) -> Iterator[Any]:
    """Calls within compute everything and leave no trace; history from before is dropped."""
    if llm.is_llm(target):
        with llm.state(target).pause():
            yield target
        return
    states = _states(target)
    for state in states:
        state.clear()
        state.clock.reset()
        state.paused += 1
    try:
        yield target
    finally:
        for state in states:
            state.paused -= 1


@contextmanager
def chunk(target: Any, index: int) -> Iterator[None]:
    """Calls within belong to chunk `index` of an autoregressive video.

    Pipelines of diffusers that generate by chunks need none of this: see pipelines/CHUNKS.md.
    """
    states = _states(target)
    before = [state.clock.chunk for state in states]
    for state in states:
        state.clock.chunk = index
    try:
        yield
    finally:
        for state, old in zip(states, before, strict=True):
            state.clock.chunk = old


@contextmanager
def kv_write(target: Any) -> Iterator[None]:
    """Calls within leave keys and values behind: always computed, and no history sees them."""
    states = _states(target)
    for state in states:
        state.clock.pass_kind = "kv_write"
    try:
        yield
    finally:
        for state in states:
            state.clock.pass_kind = "denoise"


class WrappedClass:
    """A class's constructors, each returning a wrapped instance; the class stays as it is."""

    def __init__(self, cls: type, policy: Any, strict: bool, overrides: dict[str, Any]) -> None:
        self._cls, self._settings = cls, (policy, strict, overrides)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapped(self._cls(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._cls, name)
        if not callable(attribute) or getattr(attribute, "__self__", None) is not self._cls:
            return attribute

        def construct(*args: Any, **kwargs: Any) -> Any:
            return self._wrapped(attribute(*args, **kwargs))

        return construct

    def __repr__(self) -> str:
        return f"diffcache.wrap({self._cls.__name__})"

    def _wrapped(self, made: Any) -> Any:
        if not isinstance(made, self._cls):
            return made
        policy, strict, overrides = self._settings
        return wrap(made, policy, strict=strict, **overrides)


def _denoisers(target: Any, wrapped_only: bool = False) -> dict[str, nn.Module]:
    """The denoisers of a target by name.

    Raises:
        ValueError: there is nothing that could be wrapped.
    """
    if isinstance(target, nn.Module):
        return {type(getattr(target, "_orig_mod", target)).__name__: target}
    from .pipelines.denoisers import denoisers, is_pipeline

    if not is_pipeline(target):
        raise ValueError(
            f"cannot wrap a {type(target).__name__}: give a diffusers pipeline, a module or a class"
        )
    found = denoisers(target)
    if not found and not wrapped_only:
        raise ValueError(
            f"{type(target).__name__} has no denoiser (a module called with a timestep)"
        )
    return found


def _family(target: Any, name: str, module: nn.Module) -> str:
    from .pipelines.families import family

    return family(module, None if isinstance(target, nn.Module) else target, name)


def _policies(
    found: Mapping[str, nn.Module],
    policy: PolicyLike | Mapping[str, PolicyLike],
    overrides: Mapping[str, Any],
) -> dict[str, Policy]:
    if not isinstance(policy, Mapping):
        one = get_policy(policy, **overrides)
        return dict.fromkeys(found, one)
    for name in policy:
        if name not in found:
            raise ValueError(f"no denoiser is called {name!r}; there are: {', '.join(found)}")
    return {name: get_policy(value, **overrides) for name, value in policy.items()}


def _install(
    modules: Mapping[str, nn.Module], policies: Mapping[str, Policy], strict: bool
) -> None:
    """All or nothing: every site is found before the first hook is put on."""
    from .pipelines.passes import writes_kv
    from .pipelines.signals import read_signal

    prepared = []
    for name, module in modules.items():
        refuse_double(name, module)
        covered = _covered(module)
        if covered is not None:
            covered.remove()
        state = _state(module)
        fresh = state is None
        state = state or Denoiser(module, name, policies[name])
        prepared.append((state, fresh, policies[name], state.make_site(policies[name])))
    for state, fresh, policy, site in prepared:
        state.use(policy, site)
        state.strict = strict
        state.signal, state.writes = read_signal, writes_kv
        if fresh:
            state.install()


def _state(module: nn.Module) -> Denoiser | None:
    return module.__dict__.get(ATTRIBUTE)


def _covered(module: nn.Module) -> Denoiser | None:
    """The state of a denoiser that was put under `torch.compile` after it was wrapped."""
    inner = module.__dict__["_modules"].get("_orig_mod")
    return None if inner is None else _state(inner)


def _states(target: Any) -> list[Denoiser]:
    found = _denoisers(target)
    states = [state for state in map(_state, found.values()) if state is not None]
    if any(_covered(module) is not None for module in found.values()):
        raise ValueError(COVERED)
    if not states:
        raise ValueError(
            f"this {type(target).__name__} is not wrapped: call diffcache.wrap on it first"
        )
    return states


def _watch(pipeline: Any, states: list[Denoiser]) -> None:
    """Shows the pipeline's scheduler to the denoisers; frees their history when its call ends."""
    from .pipelines.chunked import chunk_rule
    from .pipelines.denoisers import served_timesteps

    for state in states:
        state.clock.watch(pipeline, served_timesteps(pipeline, state.name))
    if not hasattr(pipeline, "maybe_free_model_hooks"):
        return
    if pipeline.__dict__.get(PIPELINE_ATTRIBUTE) is None:
        rule = chunk_rule(pipeline)
        heard = [] if rule is None else listen(pipeline, rule, _progresses)
        patches: list[InstancePatch | Heard] = [_patch_end_of_run(pipeline), *heard]
        pipeline.__dict__[PIPELINE_ATTRIBUTE] = Watched(patches)
    for state in states:
        seen = (weakref.ref(state.module), state.strict)
        pipeline.__dict__[PIPELINE_ATTRIBUTE].modules[state.name] = seen


def _unwatch(target: Any) -> None:
    """Takes our patches off a pipeline; a module has none."""
    watched = getattr(target, "__dict__", {}).pop(PIPELINE_ATTRIBUTE, None)
    if watched is not None:
        for patch in watched.patches:
            patch.remove()


class Watched:
    """What stands on a wrapped pipeline: patches, and by name what was wrapped, and how strictly.

    Copies and pickles of the pipeline are not wrapped.
    """

    def __init__(self, patches: list[InstancePatch | Heard]) -> None:
        self.patches = patches
        self.modules: dict[str, tuple[Callable[[], Any], bool]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def complain(self, pipeline: Any) -> None:
        """Says that another module stands where one was wrapped: raises with strict, else warns."""
        for name, (wrapped, strict) in self.modules.items():
            module = getattr(pipeline, name, None)
            if module is None or module is wrapped() or _state(module) or _covered(module):
                continue
            if strict:
                raise DiffcacheError(EXCHANGED.format(name))
            warnings.warn(EXCHANGED.format(name), DiffcacheWarning, stacklevel=5)


def _patch_end_of_run(pipeline: Any) -> InstancePatch:
    reference: Callable[[], Any] = weakref.ref(pipeline)

    def end(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        owner = reference()
        try:
            _end_of_run(owner)
        finally:
            result = original(*args, **kwargs)
            _reinstall(owner)
        return result

    hook = CallHook(pipeline.maybe_free_model_hooks, end)
    return InstancePatch(pipeline, "maybe_free_model_hooks", hook)


def _progresses(pipeline: Any) -> list[Progress]:
    states = map(_state, _denoisers(pipeline, wrapped_only=True).values())
    return [state.clock.progress for state in states if state is not None]


def _reinstall(pipeline: Any) -> None:
    """Model offload puts its own hooks on anew at the end of each call, and drops ours."""
    for module in _denoisers(pipeline, wrapped_only=True).values():
        state = _state(module)
        if state is not None:
            state.reinstall()


def _end_of_run(pipeline: Any) -> None:
    for module in _denoisers(pipeline, wrapped_only=True).values():
        state = _state(module)
        if state is not None:
            state.clear()
            state.clock.progress.end_run()
            _complain(state)
        elif _covered(module) is not None:
            warnings.warn(COVERED, DiffcacheWarning, stacklevel=4)
    watched = pipeline.__dict__.get(PIPELINE_ATTRIBUTE)
    if watched is not None:
        watched.complain(pipeline)


def _complain(state: Denoiser, raising_only: bool = False) -> None:
    """Says that a run skipped nothing: raises with strict, else warns once."""
    reason = state.skipped_nothing()
    if reason is None:
        return
    text = (
        f"{state.name}: policy {state.policy.name!r} skipped nothing ({reason}); "
        "see diffcache.report"
    )
    if state.strict:
        raise DiffcacheError(text)
    if not raising_only and not state.warned:
        state.warned = True
        warnings.warn(text, DiffcacheWarning, stacklevel=4)

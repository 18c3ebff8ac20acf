"""One wrapped denoiser: what happens in each of its calls, in the order that DESIGN fixes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import nn

from .agreement import Ranks, sharing
from .context import CallContext, Clock, PassKind, Trajectory
from .features.cell import Cell, Decision
from .features.sites import Model
from .features.store import TensorStore
from .hooks import (
    COMPILED,
    InstalledContext,
    InstalledForward,
    InstalledRefusal,
    Named,
    foreign_cache,
)
from .model_site import ModelSite
from .policy import Policy
from .records import Recorder, Row
from .signals import Signal
from .signature import Call, CallSignature
from .stack_site import StackSite

ATTRIBUTE = "_diffcache"
COMPILED_WHOLE = (
    "{} cannot skip blocks inside one compiled graph: use site='model', "
    "or compile the blocks alone (compile_repeated_blocks)"
)
AMBIGUOUS = (
    "{}: two passes of one step have the same name or, unnamed, the same conditioning, so all are "
    "computed: name each with the denoiser's cache_context, or put both into one batch"
)
ALREADY_OURS = "diffcache already caches {0}: call diffcache.unwrap on it before {0}.enable_cache()"


class Denoiser:
    """The state of one wrapped module; it lives in that module's `__dict__`.

    Raises:
        ValueError: the module's forward takes no timestep, or the policy's site is not found in it.
    """

    def __init__(self, module: nn.Module, name: str, policy: Policy) -> None:
        self.module = module
        self.name = name
        self.strict = False
        self.paused = 0
        self.signal: Signal | None = None  # reads the time signal off a call, for probes of it
        self.writes: Callable[..., bool] | None = None  # tells a pass that writes keys and values
        self.observer: Callable[[CallContext, Any], None] | None = None  # of calibration
        self.clock = Clock()
        self.recorder = Recorder()
        inner: Any = getattr(module, "_orig_mod", module)
        self.signature = CallSignature(type(inner).forward, type(inner).__name__)
        self.installed: list[InstalledForward | InstalledContext | InstalledRefusal] = []
        self.use(policy, self.make_site(policy))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles of the module are not wrapped."""
        return type(None), ()

    def install(self) -> None:
        """Puts the hooks on the module."""
        self.installed.append(InstalledForward(self.module, self.call, self._may_compile))
        if hasattr(self.module, "cache_context"):
            self.installed.append(InstalledContext(self.module, self._heard))
        if hasattr(self.module, "enable_cache"):
            remedy = ALREADY_OURS.format(self.name)
            self.installed.append(InstalledRefusal(self.module, remedy))
        self.module.__dict__[ATTRIBUTE] = self

    def make_site(self, policy: Policy) -> StackSite | ModelSite:
        """The site of a policy in this module; changes nothing yet.

        Raises:
            ValueError: there is no such site in this module.
        """
        if not policy.site.blocks:
            return ModelSite(self)
        if hasattr(self.module, "_orig_mod") or self.module.__dict__.get(COMPILED) is not None:
            raise ValueError(COMPILED_WHOLE.format(self.name))
        return StackSite(self, policy)

    def use(self, policy: Policy, site: StackSite | ModelSite) -> None:
        """Takes up a policy; the history made under the old one is dropped."""
        self.policy, self.site = policy, site
        self.store = TensorStore(policy.store)
        self.cells: dict[tuple[Any, ...], Cell] = {}
        self.warned = False
        self.ranks: Ranks | None = None
        self.clock.reset()

    def reinstall(self) -> None:
        """Puts our forward back where a hook that was there before us took it away again."""
        forward = next(x for x in self.installed if isinstance(x, InstalledForward))
        if not forward.reachable():
            forward.remove()
            self.installed.remove(forward)
            self.installed.append(InstalledForward(self.module, self.call, self._may_compile))

    def remove(self) -> None:
        """Takes everything off the module again."""
        self.clear()
        for installed in self.installed:
            installed.remove()
        self.module.__dict__.pop(ATTRIBUTE, None)

    def call(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Stands in for `module.forward`."""
        if self.paused:
            return original(*args, **kwargs)
        begun = perf_counter()
        before, count = self.recorder.rows, len(self.recorder.rows)
        output = self._run(original, args, kwargs)
        rows = self.recorder.rows  # a new list where this call began a new run
        first = count if rows is before else 0
        if len(rows) > first:
            self.recorder.end_call(rows[first], perf_counter() - begun)
        return output

    def _run(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = self.signature.bind(args, kwargs)
        kind = self._pass_kind(call)
        self.clock.progress.hear(call.arguments, wrote=kind == "kv_write")
        timestep = call.arguments.get(str(self.signature.timestep))
        if self.clock.progress.masked and isinstance(timestep, torch.Tensor):
            call.timestep = float(timestep.max())
        if kind != "denoise":
            return self._plain(original, args, kwargs, kind, call.timestep, kind)
        if self._records_gradients(call.hidden_states):
            return self._plain(original, args, kwargs, "gradients are recorded", call.timestep)
        before = self.clock.trajectory
        context = self.clock.begin(call)
        if context is None:
            self.clear()
            return self._plain(original, args, kwargs, "no single time", None)
        if context.new is not None:
            self._new_trajectory(context, before)
        if context.ambiguous:
            self.recorder.note(AMBIGUOUS.format(self.name))
        if self.policy.axis == "chunk" and context.chunk is not None:
            context = replace(context, time=float(context.chunk))
        count = len(self.recorder.rows)
        output = self.site.run(context, call, original, args, kwargs)
        if len(self.recorder.rows) == count:
            self.record(context, Decision(False, "nothing in this forward can be skipped"))
        if self.observer is not None:
            self.observer(context, output)
        self._note_refused()
        self._free_served(context)
        return output

    def cell(self, context: CallContext, place: str) -> Cell:
        """The cell of one place in this call's branch (and step, on the chunk axis)."""
        key: tuple[Any, ...] = (context.branch, place)
        if self.policy.axis == "chunk":
            key = (*key, context.step)
        if key not in self.cells:
            self.cells[key] = Cell(self.policy, self.store, self.ranks)
        return self.cells[key]

    def record(
        self, context: CallContext, decision: Decision, site: str | None = None, saved: float = 0.0
    ) -> Row:
        row = Row(
            self.name,
            site or self.policy.site.kind,
            context.branch,
            context.chunk,
            context.step,
            context.timestep,
            context.sigma,
            "reuse" if decision.reuse else "compute",
            decision.reason,
            decision.metric,
            decision.error,
            saved,
        )
        self.recorder.add(row)
        return row

    def clear(self) -> None:
        """Drops all history."""
        for cell in self.cells.values():
            cell.clear()
        self.cells = {}

    def reset(self) -> None:
        """As after wrap: no history, no trajectory, no rows."""
        self.clear()
        self.clock.reset()
        self.clock.progress.end_run()
        self.recorder.begin(None)

    def skipped_nothing(self) -> str | None:
        """The reason why a run in which calls were made skipped nothing, else None."""
        rows = self.recorder.rows
        exact = self.policy == self.policy.with_settings(**self.policy.exact) and bool(
            self.policy.exact
        )
        if exact or not rows or any(row.decision == "reuse" for row in rows):
            return None
        reasons = [row.reason for row in rows]
        return max(set(reasons), key=reasons.count)

    def _may_compile(self) -> None:
        if self.policy.site.blocks:
            raise ValueError(COMPILED_WHOLE.format(self.name))

    def _heard(self, named: Named) -> Named:
        before, self.clock.named = self.clock.named, named
        return before

    def _plain(
        self,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        reason: str,
        t: float | None,
        kind: PassKind = "denoise",
    ) -> Any:
        """Computes without touching any history."""
        name = self.clock.named[0] if self.clock.named else "all"
        time = float("nan") if t is None else t
        chunk, run = self.clock.chunk_now, self.clock.progress.run
        context = CallContext(name, chunk, 0, 0, time, None, time, kind, None, None)
        if run is not None and run is not self.recorder.token:
            self.recorder.begin(run)
        output = original(*args, **kwargs)
        self.record(context, Decision(False, reason))
        return output

    def _pass_kind(self, call: Call) -> PassKind:
        """What the user says, else what the call's own arguments tell."""
        if self.clock.pass_kind != "denoise" or self.writes is None:
            return self.clock.pass_kind
        writes = self.writes(call.arguments, call.arguments.get(str(self.signature.timestep)))
        return "kv_write" if writes else "denoise"

    def _new_trajectory(self, context: CallContext, before: Trajectory | None) -> None:
        trajectory = self.clock.trajectory
        assert trajectory is not None
        self.ranks = sharing(self.module, self.policy.guards.ranks)
        refuse_double(self.name, self.module)
        token = self.clock.progress.run
        if token is None and trajectory.schedule is not None:
            token = trajectory.schedule.token
        further = _further(before, trajectory)
        same = before is not None and before.signature == trajectory.signature
        carries = self.policy.axis == "chunk" and further and same
        if not carries:
            self.clear()
        # A conditioning that changes within a run, or the next chunk of one, does not begin a new
        # report.
        same_run = context.ambiguous or (token is not None and token is self.recorder.token)
        if not further and not same_run and context.new != "conditioning changed":
            self.recorder.begin(token)
        if not further:
            self._remark(context)

    def _remark(self, context: CallContext) -> None:
        for remark in self.policy.remarks(context):
            self.recorder.note(f"{self.name}: {remark}")
        if self.policy.predictor.corrects and not self._can_correct(context):
            self.recorder.note(
                f"{self.name}: predictions are not corrected; that needs site='model' with "
                "form 'output' and a one-stage flow-matching scheduler"
            )

    def _can_correct(self, context: CallContext) -> bool:
        return self.policy.site == Model(form="output") and context.width is not None

    def _note_refused(self) -> None:
        if self.store.refused:
            self.recorder.note(
                f"{self.name}: max_bytes={self.store.settings.max_bytes} is too small "
                f"({self.store.refused:,} bytes more did not fit): raise it, or compute more"
            )

    def _free_served(self, context: CallContext) -> None:
        """A branch gives its bytes back once the scheduler's last timestep was served."""
        if self.policy.axis == "chunk" or not self.clock.last_served(context):
            return
        for key in [key for key in self.cells if key[0] == context.branch]:
            self.cells.pop(key).clear()

    def _records_gradients(self, hidden_states: torch.Tensor) -> bool:
        if not torch.is_grad_enabled():
            return False
        parameter = next(self.module.parameters(), None)
        return hidden_states.requires_grad or (parameter is not None and parameter.requires_grad)


def refuse_double(name: str, module: nn.Module) -> None:
    """Two caches at work would each spoil what the other keeps.

    Raises:
        ValueError: diffusers or cache-dit caches this module, or something in it.
    """
    if module.__dict__.get("_is_cached"):
        raise ValueError(
            f"cache-dit already caches {name}: call cache_dit.disable_cache on the pipeline "
            "before diffcache.wrap"
        )
    hook = foreign_cache(module)
    if hook is None and not getattr(module, "is_cache_enabled", False):
        return
    where = f" (its hook {hook!r})" if hook else ""
    raise ValueError(
        f"diffusers already caches {name}{where}: call {name}.disable_cache(), "
        "or remove the hook, before diffcache.wrap"
    )


def _further(before: Trajectory | None, now: Trajectory) -> bool:
    """Whether this trajectory is of a later chunk of the same run."""
    if before is None or before.chunk is None or now.chunk is None:
        return False
    return now.part[-1] is before.part[-1] and now.chunk > before.chunk

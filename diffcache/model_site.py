"""The model site: the whole denoiser's output is rebuilt, none of it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from .context import CallContext
from .features.cell import Cell, Decision
from .features.probes import TimeSignal
from .signals import SignalCall
from .signature import Call, tensor_list

if TYPE_CHECKING:
    from .denoiser import Denoiser


@dataclass(slots=True)
class Template:
    """The shape of a computed output, in which a predicted one is handed out."""

    spec: TreeSpec
    # Floating tensors are replaced by empty ones that carry dtype and device.
    leaves: list[Any]


@dataclass(frozen=True, slots=True)
class HandedBack:
    """In place of a container that a model was given and returns: its cache of keys and values."""

    name: str


class ModelSite:
    """Decides about, rebuilds and learns whole outputs."""

    hooked = 1

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser = denoiser
        self.templates: dict[str, Template] = {}

    def run(
        self,
        context: CallContext,
        call: Call,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        cell = self.denoiser.cell(context, "model")
        probe = self.denoiser.policy.probe
        latents = call.hidden_states
        if isinstance(probe, TimeSignal):
            read, at = self.denoiser.signal, SignalCall(self.denoiser.module, context.timestep)
            fingerprint = None if read is None else read(at, probe.signal)
        else:
            fingerprint = None if probe is None else probe.fingerprint(latents, latents)
        decision = cell.decide(context, fingerprint)
        template = self.templates.get(context.branch)
        if decision.reuse and template is not None:
            self.denoiser.record(context, decision, saved=1.0)
            return self._rebuild(template, cell, context, call)
        inputs, fingerprint = self._snapshot(call, fingerprint)
        output = original(*args, **kwargs)
        decision, output = self._learn(context, cell, call, inputs, fingerprint, output, decision)
        self.denoiser.record(context, replace(decision, reuse=False))
        return output

    def _rebuild(self, template: Template, cell: Cell, context: CallContext, call: Call) -> Any:
        empty = tuple(leaf for leaf in template.leaves if isinstance(leaf, Tensor))
        rebuilt = list(cell.predict(context, empty))
        if self._residual:
            for i, tensor in enumerate(rebuilt):
                base = _base(call.inputs, i, tensor)
                if base is not None:
                    tensor.add_(base)
        streams = iter(rebuilt)
        leaves = [next(streams) if isinstance(leaf, Tensor) else leaf for leaf in template.leaves]
        leaves = [
            call.arguments[leaf.name] if isinstance(leaf, HandedBack) else leaf for leaf in leaves
        ]
        return tree_unflatten(leaves, template.spec)

    def _learn(
        self,
        context: CallContext,
        cell: Cell,
        call: Call,
        inputs: tuple[Tensor, ...],
        fingerprint: Tensor | None,
        output: Any,
        decision: Decision,
    ) -> tuple[Decision, Any]:
        """Takes the output in; returns what is recorded and what is handed out."""
        given = _containers(call)
        leaves, spec = tree_flatten(output, is_leaf=lambda part: id(part) in given)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors or not all(tensor.is_floating_point() for tensor in tensors):
            reason = f"output {type(output).__name__} holds no floating tensors alone"
            return replace(decision, reason=reason), output
        empty = [
            torch.empty(0, dtype=x.dtype, device=x.device)
            if isinstance(x, Tensor)
            else given.get(id(x), x)
            for x in leaves
        ]
        self.templates[context.branch] = Template(spec, empty)
        streams, owned = tuple(tensors), False
        if self._residual:
            bases = [_base(inputs, i, tensor) for i, tensor in enumerate(tensors)]
            streams = tuple(
                t if base is None else t - base for t, base in zip(tensors, bases, strict=True)
            )
            owned = all(base is not None for base in bases)
        corrected = None if self._residual else cell.correct(context, streams)
        error = cell.push(context, fingerprint, streams, tensors[0], owned)
        if corrected is not None:
            paid = iter(corrected)
            leaves = [next(paid) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            output = tree_unflatten(leaves, spec)
        return replace(decision, error=error), output

    def _snapshot(
        self, call: Call, fingerprint: Tensor | None
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """Copies of what is compared or subtracted later: a model may write into its input."""
        if not self._residual and fingerprint is None:
            return call.inputs, None
        inputs = tuple(tensor.clone() for tensor in call.inputs)
        return inputs, inputs[0] if fingerprint is call.hidden_states else fingerprint

    @property
    def _residual(self) -> bool:
        return getattr(self.denoiser.policy.site, "form", "output") == "residual"


def _containers(call: Call) -> dict[int, HandedBack]:
    """The arguments that are neither plain values nor made of tensors alone, by identity."""
    plain = (Tensor, str, int, float, type(None))
    return {
        id(value): HandedBack(name)
        for name, value in call.arguments.items()
        if not isinstance(value, plain) and not tensor_list(value)
    }


def _base(inputs: tuple[Tensor, ...], i: int, output: Tensor) -> Tensor | None:
    """The noise channels of input `i`; image-to-video models append condition channels to them."""
    if i >= len(inputs) or inputs[i].dim() != output.dim() or output.dim() < 2:
        return None
    base = inputs[i]
    if base.shape[1] > output.shape[1]:
        base = base[:, : output.shape[1]]
    return base.to(output.dtype) if base.shape == output.shape else None

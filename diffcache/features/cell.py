"""A cell: what is remembered at one site of one branch, and the four stages in their order."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..agreement import Ranks
from ..context import CallContext
from .correction import Prediction, owed_weights
from .store import TensorStore

if TYPE_CHECKING:
    from ..policy import Policy

# Errors are measured on at most about this many elements of a tensor, taken at an even stride.
ERROR_SAMPLE = 1 << 15


@dataclass(frozen=True, slots=True)
class Decision:
    """What a cell says about one call."""

    reuse: bool
    reason: str
    metric: float | None = None
    error: float | None = None


@dataclass(slots=True)
class Entry:
    """One computed step: its time and its tensors (outputs or residuals, one for each stream)."""

    time: float
    tensors: tuple[Tensor, ...]
    total: Tensor | float  # the sum of all streams: finite exactly if all of them are

    def finite(self) -> bool:
        """Whether there is no NaN or infinity in it; read late, so that the device can run on."""
        self.total = float(self.total)
        return math.isfinite(self.total)


class Cell:
    """History, fingerprint and counters of one (site, branch), on the chunk axis also step."""

    def __init__(self, policy: Policy, store: TensorStore, ranks: Ranks | None = None) -> None:
        self.policy = policy
        self.store = store
        self.ranks = ranks  # others that must take the same branch
        self.history: list[Entry] = []
        self.predictions: list[Prediction] = []  # since the last computed step
        self.numbers: dict[str, float] = {}
        self.computed = 0
        self.reused = 0
        self.reuses_in_a_row = 0
        # One check costs as much as a probe: blocks by themselves go without, unless the policy
        # asks.
        wanted = policy.predictor.adaptive or policy.guards.max_error is not None
        self.checks = wanted or not policy.site.per_block
        self._kept: dict[str, Tensor] = {}
        self._sum: float | None = None

    def decide(self, context: CallContext, fingerprint: Tensor | None) -> Decision:
        """Guards, then probe and metric, then the gate. Counts nothing yet."""
        decision = self._decide(context, fingerprint)
        if self._anywhere(not decision.reuse) and decision.reuse:
            return replace(decision, reuse=False, reason="another rank computes")
        return decision

    def remembers(self) -> bool:
        """Whether there is something to predict from, on every rank."""
        return not self._anywhere(not self.history)

    def _anywhere(self, flag: bool) -> bool:
        return flag if self.ranks is None else self.ranks.any(flag)

    def _decide(self, context: CallContext, fingerprint: Tensor | None) -> Decision:
        value = self._measure(fingerprint)
        reason = self.policy.guards.reason(context, self)
        if reason is not None:
            return Decision(False, reason, value)
        if value is not None and not math.isfinite(value):
            return Decision(False, "non-finite metric", value)
        reuse = self.policy.gate.reuse(context, value, self)
        return Decision(reuse, self.policy.gate.kind, value)

    def predict(self, context: CallContext, like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Fresh tensors for this call, one for each stream, with the dtype and device of `like`."""
        times = [entry.time for entry in self.history]
        weights = self.policy.predictor.weights(times, context.time, self)
        self.reused += 1
        self.reuses_in_a_row += 1
        if self.policy.predictor.corrects and context.width is not None:
            self.predictions.append(Prediction(context.time, context.width, weights))
        return tuple(
            self._combine([entry.tensors[stream] for entry in self.history], weights, template)
            for stream, template in enumerate(like)
        )

    def correct(
        self, context: CallContext, outputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...] | None:
        """The computed outputs plus what the predictions since the last ones owe; None: nothing.

        To be called before `push`, while the history is the one that was predicted from.
        """
        made, self.predictions = self.predictions, []
        if not made or not context.width:
            return None
        times = [entry.time for entry in self.history]
        owed = owed_weights(times, context.time, context.width, made)
        owed[-1] += 1.0
        return tuple(
            self._combine([*(e.tensors[stream] for e in self.history), output], owed, output)
            for stream, output in enumerate(outputs)
        )

    def push(
        self,
        context: CallContext,
        fingerprint: Tensor | None,
        outputs: tuple[Tensor, ...],
        truth: Tensor,
        owned: bool = False,
    ) -> float | None:
        """Takes in a computed step.

        Args:
            outputs: what is remembered, one tensor for each stream: outputs or residuals.
            truth: the site's true output, for the metric.
            owned: nobody else holds `outputs`, so they need not be copied.

        Returns:
            The relative L1 error that the prediction of this step would have had; None without
            history.
        """
        time, policy = context.time, self.policy
        error = self._check(time, outputs)
        if error is not None:
            self.numbers["error"] = error
        if fingerprint is not None and policy.metric is not None:
            policy.metric.learn(fingerprint, truth, self)
            self.keep("reference", fingerprint)
        policy.gate.learn(context, self)
        self._remember(time, outputs, owned)
        self.computed += 1
        self.reuses_in_a_row = 0
        return error

    def finite(self) -> bool:
        """Whether no remembered step holds a NaN or an infinity."""
        return all(entry.finite() for entry in self.history)

    def keep(self, name: str, tensor: Tensor) -> None:
        """Holds a copy of `tensor` under `name`, or nothing where it does not fit."""
        self._sum = None if name == "reference" else self._sum
        held = self._kept.get(name)
        same = held is not None and held.shape == tensor.shape and held.device == tensor.device
        if held is not None and same and held.dtype == tensor.dtype:
            held.copy_(tensor)
            return
        if held is not None:
            self.store.drop(self._kept.pop(name))
        copy = self.store.put(tensor)
        if copy is not None:
            self._kept[name] = copy

    def kept(self, name: str, like: Tensor) -> Tensor | None:
        """The tensor held under `name` on the device and in the dtype of `like`."""
        held = self._kept.get(name)
        return None if held is None else held.to(like.device, like.dtype)

    def reference_sum(self, reference: Tensor) -> float:
        """The sum of |reference|, computed once for each reference."""
        if self._sum is None:
            self._sum = sum_abs(reference)
        return self._sum

    def clear(self) -> None:
        """Forgets everything and gives the bytes back."""
        for entry in self.history:
            self._drop(entry)
        for tensor in self._kept.values():
            self.store.drop(tensor)
        self.history, self._kept, self.numbers, self._sum = [], {}, {}, None
        self.predictions = []
        self.computed = self.reused = self.reuses_in_a_row = 0

    def _measure(self, fingerprint: Tensor | None) -> float | None:
        metric = self.policy.metric
        if metric is None or fingerprint is None:
            return None
        reference = self.kept("reference", fingerprint)
        if reference is None or reference.shape != fingerprint.shape:
            return None
        value = metric.measure(fingerprint, reference, self)
        if metric.reference == "previous":
            self.keep("reference", fingerprint)
        return value

    def _check(self, time: float, outputs: tuple[Tensor, ...]) -> float | None:
        """Compares what would have been predicted for `time` with the truth, on a sample."""
        if not self.history or not self.checks:
            return None
        stacked = torch.stack([_sample(entry.tensors[0]) for entry in self.history]).float()
        truth = _sample(outputs[0]).to(stacked.device, torch.float32)

        def errors(weights: list[list[float]]) -> list[float]:
            off = (torch.tensor(weights, device=stacked.device) @ stacked).sub_(truth).abs_()
            found: list[float] = (off.sum(1) / truth.abs().sum()).tolist()
            return found if self.ranks is None else self.ranks.worst(found)

        times = [entry.time for entry in self.history]
        return self.policy.predictor.learn(times, time, errors, self)

    def _remember(self, time: float, outputs: tuple[Tensor, ...], owned: bool) -> None:
        """Adds an entry, making room first: the budget holds at every moment."""
        # A second call at the same time replaces the first: two equal times cannot be interpolated.
        for entry in [entry for entry in self.history if entry.time == time]:
            self.history.remove(entry)
            self._drop(entry)
        needed = sum(self.store.nbytes(tensor) for tensor in outputs)
        while self.history and (
            len(self.history) >= self.policy.predictor.depth or not self.store.fits(needed)
        ):
            self._drop(self.history.pop(0))
        held: list[Tensor] = []
        for tensor in outputs:
            copy = self.store.put(tensor, owned)
            if copy is None:
                for other in held:
                    self.store.drop(other)
                return
            held.append(copy)
        total = sum(tensor.sum(dtype=torch.float32) for tensor in held)
        self.history.append(Entry(time, tuple(held), total))

    def _drop(self, entry: Entry) -> None:
        for tensor in entry.tensors:
            self.store.drop(tensor)

    @staticmethod
    def _combine(tensors: list[Tensor], weights: list[float], like: Tensor) -> Tensor:
        """The weighted sum in fp32; a hold is an exact copy."""
        if weights[-1] == 1.0 and not any(weights[:-1]):
            return tensors[-1].to(like.device, like.dtype, copy=True)
        total = tensors[-1].to(like.device, torch.float32) * weights[-1]
        for tensor, weight in zip(tensors[:-1], weights[:-1], strict=True):
            if weight:
                total.add_(tensor.to(like.device, torch.float32), alpha=weight)
        return total.to(like.dtype)


def sum_abs(tensor: Tensor) -> float:
    """Sum of absolute values, added up in fp32: ratios of these are ratios of means."""
    return float(tensor.abs().sum(dtype=torch.float32))


def quotient(a: float, b: float) -> float:
    """a / b; NaN for 0 / 0 and infinity for a / 0, as tensors have it."""
    if b == 0:
        return math.nan if a == 0 or math.isnan(a) else math.inf
    return a / b


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat[:: max(1, flat.numel() // ERROR_SAMPLE)]

"""The stack, span and block sites: some of the blocks are skipped, their residuals rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from .blocks import BlockList, Contract, Observer, find_block_lists
from .context import CallContext
from .features.cell import Cell, Decision
from .features.probes import TimeSignal
from .policy import Policy
from .records import Row
from .signals import SignalCall
from .signature import Call
from .spans import ContractBroken, GuidedPass, shimmed

if TYPE_CHECKING:
    from .denoiser import Denoiser

Forward = Callable[
    [Callable[..., Any]], Any
]  # runs the model with that function in every block's place

# A structure that changes more often than this within one call is given up on.
MAX_OBSERVATIONS = 3
# How far a replayed forward may be off: rounding of (in + (out - in)) in each dtype.
REPLAY_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


class StackSite:
    """Learns the contract of the blocks, then decides region by region.

    Raises:
        ValueError: no list of repeated blocks, or fewer blocks than the site needs.
    """

    def __init__(self, denoiser: Denoiser, policy: Policy) -> None:
        self.denoiser = denoiser
        self.policy = policy
        module = denoiser.module
        inner = getattr(module, "_orig_mod", module)
        self.lists: list[BlockList] = find_block_lists(inner)
        where = type(inner).__name__
        if not self.lists:
            raise ValueError(f"{where} holds no list of repeated blocks: use site='model'")
        self.hooked = sum(len(item) for item in self.lists)
        policy.site.span(self.hooked)
        self.contracts: dict[str, Contract | None] = {}  # None: observe again
        self.refused: dict[str, str] = {}  # branch -> why its blocks cannot be skipped

    def run(
        self,
        context: CallContext,
        call: Call,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        entry = [tensor.clone() for tensor in call.inputs] if self._may_repeat(context) else []

        def forward(run: Callable[..., Any]) -> Any:
            _restore(call.inputs, entry)
            with shimmed(self.lists, run):
                return original(*args, **kwargs)

        for _ in range(MAX_OBSERVATIONS):
            if context.branch in self.refused:
                break
            contract = self._contract(context.branch) or self._observe(context, forward)
            if contract is not None:
                try:
                    return self._guided(context, contract, forward)
                except ContractBroken:
                    # Another structure from here on: what was learned under the old one is void.
                    self.contracts[context.branch] = None
                    self.denoiser.clear()
        else:
            self._refuse(context, "its blocks run otherwise from call to call: use site='model'")
        self.denoiser.record(context, Decision(False, self.refused[context.branch]))
        _restore(call.inputs, entry)
        return original(*args, **kwargs)

    def _may_repeat(self, context: CallContext) -> bool:
        """Whether this call may take more than one pass: nothing known, or blocks that mutate."""
        contract = self._contract(context.branch)
        if contract is None or not contract.verified:
            return True
        return any(call.mutates for call in contract.calls)

    def _contract(self, branch: str) -> Contract | None:
        """The branch's own contract; another branch's will do until it is seen not to hold."""
        if branch in self.contracts:
            return self.contracts[branch]
        return next((known for known in self.contracts.values() if known is not None), None)

    def _observe(self, context: CallContext, forward: Forward) -> Contract | None:
        """One forward more, in which the contract is written down; None: nothing can be skipped."""
        observer = Observer()
        forward(observer.block)
        contract = observer.contract()
        try:
            span = self.policy.site.span(len(contract.calls))
        except ValueError as error:
            self._refuse(context, str(error))
            return None
        if not contract.regions(span, self.policy.site.per_block):
            self._refuse(context, "no block's output continues one of its inputs: use site='model'")
            return None
        self.contracts[context.branch] = contract
        return contract

    def _guided(self, context: CallContext, contract: Contract, forward: Forward) -> Any:
        """One forward under the contract.

        Raises:
            ContractBroken: the blocks ran in another way; the rows are withdrawn, nothing was
                learned.
        """
        decisions = CallDecisions(self, context, contract)
        try:
            try:
                return decisions.run(forward)
            except Unverified:
                self._verify(context, contract, forward)
                return decisions.run(forward)
        except ContractBroken:
            decisions.withdraw()
            raise

    def _verify(self, context: CallContext, contract: Contract, forward: Forward) -> None:
        """Before the first skip: does skipping with a call's own residuals give that call's output?

        It does not where something outside the blocks reads what they hand on (skip connections).
        """
        regions = self.regions(contract)
        known: dict[range, tuple[Tensor, ...]] = {}
        compute = GuidedPass(contract, regions, lambda *_: None, known.__setitem__)
        # A copy: the output may be the input itself, which the replay restores.
        output = tree_map(_copied, forward(compute.block))
        compute.finish()
        replay = GuidedPass(contract, regions, lambda region, *_: known[region], lambda *_: None)
        alike, ranks = _alike(forward(replay.block), output), self.denoiser.ranks
        if alike if ranks is None else not ranks.any(not alike):
            contract.verified = True
            return
        self._refuse(
            context,
            "its blocks' outputs are read elsewhere and cannot be skipped: use site='model'",
        )

    def regions(self, contract: Contract) -> list[range]:
        site = self.policy.site
        return contract.regions(site.span(len(contract.calls)), site.per_block)

    def _refuse(self, context: CallContext, reason: str) -> None:
        self.refused[context.branch] = reason
        self.denoiser.recorder.note(f"{self.denoiser.name}: {reason}")


class Unverified(Exception):
    """A skip is wanted under a contract that no replay has confirmed yet."""


class CallDecisions:
    """The decisions of one forward: one for all regions, or one for each block."""

    def __init__(self, site: StackSite, context: CallContext, contract: Contract) -> None:
        self.site, self.context, self.contract = site, context, contract
        self._shared: Decision | None = None
        self._decisions: dict[range, Decision] = {}
        self._fingerprints: dict[range, Tensor | None] = {}
        self._rows: dict[range, Row] = {}
        self._signal: Tensor | None = None

    def run(self, forward: Forward) -> Any:
        """The forward's output; decisions made before an `Unverified` are kept, not made again.

        Raises:
            ContractBroken, Unverified: as their names say.
        """
        regions = self.site.regions(self.contract)
        guided = GuidedPass(self.contract, regions, self._decide, self._learn)
        output = forward(self._listening(guided))
        guided.finish()
        return output

    def _listening(self, guided: GuidedPass) -> Callable[..., Any]:
        """The pass's stand-in for blocks; where the probe asks, the first one's signal is read."""
        denoiser = self.site.denoiser
        probe = denoiser.policy.probe
        if not isinstance(probe, TimeSignal) or denoiser.signal is None:
            return guided.block
        read = denoiser.signal

        def block(name: str, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if guided.position == 0:
                call = SignalCall(denoiser.module, self.context.timestep, block, args, kwargs)
                self._signal = read(call, probe.signal)
                if self._signal is not None and self.contract.calls[0].mutates:
                    self._signal = self._signal.clone()  # it may be what the block writes over
            return guided.block(name, block, args, kwargs)

        return block

    def withdraw(self) -> None:
        """Takes back the rows of a forward that has to be done again."""
        rows = self.site.denoiser.recorder.rows
        for row in self._rows.values():
            rows.remove(row)

    def _decide(
        self, region: range, entry: tuple[Tensor, ...], front: Tensor
    ) -> tuple[Tensor, ...] | None:
        cell = self._cell(region)
        decision = self._decisions.get(region)
        if decision is None:
            decision = self._new_decision(region, cell, entry[0], front)
            self._decisions[region] = decision
        if decision.reuse and not self.contract.verified:
            if self.context.branch in self.site.refused:
                raise ContractBroken(self.site.refused[self.context.branch])
            raise Unverified
        self._record(region, decision)
        return cell.predict(self.context, entry) if decision.reuse else None

    def _new_decision(self, region: range, cell: Cell, here: Tensor, front: Tensor) -> Decision:
        policy = self.site.policy
        if self._shared is not None and not policy.site.per_block:
            no_history = self._shared.reuse and not cell.remembers()
            return Decision(False, "no history") if no_history else self._shared
        if policy.probe is not None and policy.probe.blocks and here is front:
            # Nothing has changed the stream yet (VACE's hint blocks run first): wait for one.
            return Decision(False, "before the probe")
        if policy.probe is not None and policy.probe.blocks and front.shape != here.shape:
            ranks = self.site.denoiser.ranks
            part = None if ranks is None else ranks.part(front, here.shape)
            if part is None:
                return Decision(False, "the first block's input has another shape")
            front = part
        if isinstance(policy.probe, TimeSignal):
            fingerprint = self._signal
        else:
            fingerprint = None if policy.probe is None else policy.probe.fingerprint(front, here)
        if fingerprint is here and any(self.contract.calls[i].mutates for i in region):
            fingerprint = here.clone()  # the block writes over it before it is learned
        self._fingerprints[region] = fingerprint
        self._shared = cell.decide(self.context, fingerprint)
        return self._shared

    def _learn(self, region: range, residuals: tuple[Tensor, ...]) -> None:
        cell = self._cell(region)
        fingerprint = self._fingerprints.get(region)
        self._rows[region].error = cell.push(
            self.context, fingerprint, residuals, residuals[0], owned=True
        )

    def _record(self, region: range, decision: Decision) -> None:
        saved = len(region) / len(self.contract.calls) if decision.reuse else 0.0
        site = self.site.policy.site
        place = f"block {region.start}" if site.per_block else site.kind
        self._rows[region] = self.site.denoiser.record(self.context, decision, place, saved)

    def _cell(self, region: range) -> Cell:
        return self.site.denoiser.cell(self.context, f"blocks {region.start}-{region.stop}")


def _restore(inputs: Sequence[Tensor], entry: Sequence[Tensor]) -> None:
    """A model that writes into its input must not see its own traces in a second pass."""
    for tensor, before in zip(inputs, entry, strict=False):
        if not tensor.is_meta and not torch.equal(tensor, before):
            tensor.copy_(before)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _alike(a: Any, b: Any) -> bool:
    """Whether two outputs are equal but for rounding."""
    for x, y in zip(tree_flatten(a)[0], tree_flatten(b)[0], strict=True):
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            tolerance = REPLAY_TOLERANCE.get(x.dtype, 5e-2)
            scale = y.float().abs().mean() + 1e-12
            if not bool((x.float() - y.float()).abs().mean() / scale < tolerance):
                return False
    return True

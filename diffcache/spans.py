"""Runs one forward with some of its blocks replaced: the stack, span and block sites."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from .blocks import BlockCall, BlockList, Contract, Key, argument, pack, tensors_of


class ContractBroken(Exception):
    """The forward ran its blocks otherwise than observed; nothing of this pass may be used."""


class Shim:
    """Stands in a block's place in its list during one forward; all else reaches the block."""

    __slots__ = ("_block", "_name", "_run")

    def __init__(self, name: str, block: nn.Module, run: Callable[..., Any]) -> None:
        self._name, self._block, self._run = name, block, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._name, self._block, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._block, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._block)


@contextmanager
def shimmed(lists: list[BlockList], run: Callable[..., Any]) -> Iterator[None]:
    """Puts shims into the lists and takes them out again, whatever happens in between."""
    saved = [dict(item.blocks._modules) for item in lists]
    try:
        for item in lists:
            for key, block in list(item.blocks._modules.items()):
                shim = Shim(f"{item.path}.{key}", block, run)  # type: ignore[arg-type]
                item.blocks._modules[key] = shim  # type: ignore[assignment]
        yield
    finally:
        for item, blocks in zip(lists, saved, strict=True):
            item.blocks._modules.update(blocks)


@dataclass(slots=True)
class RegionRun:
    """One region in one forward: what came in, and what is to come out where it is skipped."""

    region: range
    entry: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] | None = None


# Given a region, its entry streams and the stack's entry: the residuals to use, or None to compute.
Decide = Callable[[range, tuple[Tensor, ...], Tensor], tuple[Tensor, ...] | None]
# Given a computed region and its residuals.
Learn = Callable[[range, tuple[Tensor, ...]], None]


@dataclass
class GuidedPass:
    """One forward under a contract. Every link between blocks is checked again as it goes."""

    contract: Contract
    regions: list[range]
    decide: Decide
    learn: Learn
    position: int = 0
    learned: list[tuple[range, tuple[Tensor, ...]]] = field(default_factory=list)
    _starts: dict[int, range] = field(default_factory=dict)
    _run: RegionRun | None = None
    _handed: list[Tensor] = field(default_factory=list)
    _front: Tensor | None = None

    def __post_init__(self) -> None:
        self._starts = {region.start: region for region in self.regions}

    def block(self, name: str, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = self.position
        self.position += 1
        call = self._expected(index, name, args, kwargs)
        if index == 0:
            self._front = self._stream(call, 0, args, kwargs)
        if index in self._starts:
            self._enter(self._starts[index], call, args, kwargs)
        run = self._run
        if run is not None and run.outputs is not None:
            output = self._skip(run, index, call, args, kwargs)
        else:
            output = block(*args, **kwargs)
            if run is not None and index == run.region.stop - 1:
                self._leave(run, output)
        found = tensors_of(output)
        self._handed = found[0] if found is not None else []
        return output

    def finish(self) -> None:
        """To be called when the forward has ended; only now is anything learned.

        Raises:
            ContractBroken: fewer blocks ran than were observed.
        """
        if self.position != len(self.contract.calls):
            raise ContractBroken(f"{self.position} blocks ran, not {len(self.contract.calls)}")
        for region, residuals in self.learned:
            self.learn(region, residuals)

    def _expected(
        self, index: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> BlockCall:
        """The contract's entry for this block, once everything about it has been checked."""
        calls = self.contract.calls
        if index >= len(calls) or calls[index].name != name:
            raise ContractBroken(f"block {name} ran out of the order observed")
        if index and calls[index - 1].joined and not self._goes_on(args, kwargs):
            raise ContractBroken(f"something came in between before block {name}")
        return calls[index]

    def _goes_on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        passed = {id(value) for value in (*args, *kwargs.values())}
        return all(id(tensor) in passed for tensor in self._handed)

    def _enter(
        self, region: range, call: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        streams = [self._stream(call, i, args, kwargs) for i in range(len(call.streams))]
        entry = tuple(stream for stream in streams if stream is not None)
        self._run = None
        if len(entry) != len(streams) or self._front is None:
            return
        residuals = self.decide(region, entry, self._front)
        if residuals is not None:
            self._run = RegionRun(
                region, entry, tuple(e + r for e, r in zip(entry, residuals, strict=True))
            )
        else:
            mutates = any(self.contract.calls[i].mutates for i in region)
            self._run = RegionRun(region, tuple(e.clone() for e in entry) if mutates else entry)

    def _skip(
        self,
        run: RegionRun,
        index: int,
        call: BlockCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Hands the streams on untouched; the region's last block hands out what was predicted."""
        if index == run.region.stop - 1:
            outputs, self._run = run.outputs or (), None
            return pack(outputs, call.shape)
        streams = tuple(argument(key, args, kwargs) for key in call.streams if key is not None)
        return pack(streams, call.shape)

    def _leave(self, run: RegionRun, output: Any) -> None:
        found = tensors_of(output)
        outputs = found[0] if found is not None else []
        self._run = None
        if [o.shape for o in outputs] == [e.shape for e in run.entry]:
            residuals = tuple(
                o.detach() - e.detach() for o, e in zip(outputs, run.entry, strict=True)
            )
            self.learned.append((run.region, residuals))

    def _stream(
        self, call: BlockCall, i: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor | None:
        key: Key | None = call.streams[i] if i < len(call.streams) else None
        key = call.entry if key is None and i == 0 else key
        value = None if key is None else argument(key, args, kwargs)
        if not isinstance(value, Tensor):
            return None
        mutates = i == 0 and self._front is None and call.mutates
        return value.clone() if mutates else value

"""Finds lists of repeated blocks, and learns how tensors flow through them by watching one call."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Key = int | str  # of an argument as it was passed: by position or by keyword


@dataclass(slots=True)
class BlockList:
    """A ModuleList or Sequential of repeated blocks and where it lies."""

    path: str
    blocks: nn.Module

    def __len__(self) -> int:
        return len(self.blocks._modules)


def find_block_lists(module: nn.Module) -> list[BlockList]:
    """The shallowest lists of at least two blocks of one class, in the order of definition."""
    level = [("", module)]
    while level:
        found = [BlockList(path, child) for path, child in level if path and _repeats(child)]
        if found:
            return found
        level = [
            (f"{path}.{name}".lstrip("."), child)
            for path, parent in level
            for name, child in parent.named_children()
        ]
    return []


def _repeats(module: nn.Module) -> bool:
    children = list(module._modules.values())
    return (
        isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(children) >= 2
        and len({type(child) for child in children}) == 1
        and any(True for _ in children[0].children())  # type: ignore[union-attr]
    )


@dataclass(slots=True)
class BlockCall:
    """One block in the order in which a forward runs them.

    Attributes:
        name: "blocks.3"; a block that runs twice in one forward has two entries.
        streams: for each output tensor the argument that carries the same stream in, or None.
        shape: the outputs: None for a bare tensor, else the positions of tensors in a tuple.
        mutates: the block writes into its input.
        joined: its outputs go on to the next block as the very same objects.
        entry: of the first block, the argument that its first output is made of; the same stream,
            but of another shape where a rank keeps its own part of the tokens alone.
    """

    name: str
    streams: list[Key | None] = field(default_factory=list)
    shape: tuple[bool, ...] | None = None
    mutates: bool = False
    joined: bool = False
    usable: bool = True
    entry: Key | None = None


@dataclass(slots=True)
class Contract:
    """How one forward runs its blocks, in call order; verified once a replay has confirmed it."""

    calls: list[BlockCall]
    verified: bool = False

    def regions(self, span: range, per_block: bool) -> list[range]:
        """The runs of blocks within `span` that can be replaced as one."""
        regions: list[range] = []
        for index in span:
            call = self.calls[index]
            if not call.usable or None in call.streams:
                continue
            grown = bool(regions) and regions[-1].stop == index and not per_block
            if (
                grown
                and self.calls[index - 1].joined
                and _same_streams(self.calls[index - 1], call)
            ):
                regions[-1] = range(regions[-1].start, index + 1)
            else:
                regions.append(range(index, index + 1))
        return regions


def _same_streams(a: BlockCall, b: BlockCall) -> bool:
    return len(a.streams) == len(b.streams) and a.shape == b.shape


def tensors_of(output: Any) -> tuple[list[Tensor], tuple[bool, ...] | None] | None:
    """The tensors of a block's output and its shape; None if it is no tensor and no flat tuple."""
    if isinstance(output, Tensor):
        return [output], None
    if isinstance(output, (tuple, list)) and all(
        item is None or isinstance(item, Tensor) for item in output
    ):
        return [item for item in output if item is not None], tuple(
            item is not None for item in output
        )
    return None


def pack(tensors: tuple[Tensor, ...], shape: tuple[bool, ...] | None) -> Any:
    """The inverse of `tensors_of`."""
    if shape is None:
        return tensors[0]
    rest = iter(tensors)
    return tuple(next(rest) if present else None for present in shape)


def argument(key: Key, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument passed under `key`, or None."""
    if isinstance(key, int):
        return args[key] if key < len(args) else None
    return kwargs.get(key)


def named_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Key, Tensor]]:
    keyed: list[tuple[Key, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in keyed:
        if isinstance(value, Tensor):
            yield key, value


class Observer:
    """Watches the blocks of one full forward and writes down their contract."""

    def __init__(self) -> None:
        self.calls: list[BlockCall] = []
        self._first: dict[Key, Tensor] = {}  # inputs of the first block, until it is linked
        self._outputs: list[Tensor] = []  # of the block before, alive until the next one runs
        self._earlier: list[tuple[BlockCall, weakref.ref[Tensor]]] = []

    def block(self, name: str, block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inputs = dict(named_tensors(args, kwargs))
        keys = self._link(inputs)
        before = {key: tensor.clone() for key, tensor in inputs.items() if not tensor.is_meta}
        output = block(*args, **kwargs)
        found = tensors_of(output)
        outputs, shape = found if found is not None else ([], None)
        call = BlockCall(
            name,
            streams=_streams(keys, outputs, before or inputs),
            shape=shape,
            mutates=any(not _equal(tensor, inputs[key]) for key, tensor in before.items()),
            usable=bool(outputs),
        )
        if self.calls:
            self._earlier += [(self.calls[-1], weakref.ref(tensor)) for tensor in self._outputs]
        self._first = self._first if self.calls else before or inputs
        self._outputs = outputs
        self.calls.append(call)
        return output

    def contract(self) -> Contract:
        self._outputs = []
        return Contract(self.calls)

    def _link(self, inputs: dict[Key, Tensor]) -> list[Key | None]:
        """Joins the block before to this one where its outputs come in untouched; by which keys."""
        if not self.calls:
            return []
        by_id = {id(tensor): key for key, tensor in inputs.items()}
        keys = [by_id.get(id(tensor)) for tensor in self._outputs]
        self.calls[-1].joined = bool(keys) and None not in keys
        if self.calls[-1].joined and len(self.calls) == 1:
            # Nothing linked into the first block: its streams come in as they do here.
            self.calls[0].streams = _streams(keys, self._outputs, self._first)
            self.calls[0].entry = keys[0]
        self._first = {}
        fresh = {id(tensor) for tensor in self._outputs}
        for call, reference in self._earlier:
            tensor = reference()
            if tensor is not None and id(tensor) in by_id and id(tensor) not in fresh:
                call.joined = False  # a long skip reads it, so it has to be there
        return keys if self.calls[-1].joined else []


def _streams(
    keys: list[Key | None], outputs: list[Tensor], inputs: dict[Key, Tensor]
) -> list[Key | None]:
    """Which argument each output continues: the one linked to, else the first that looks alike."""
    alike = [
        [
            key
            for key, tensor in inputs.items()
            if tensor.shape == out.shape and tensor.dtype == out.dtype
        ]
        for out in outputs
    ]
    if len(keys) == len(outputs) and all(
        key in fits for key, fits in zip(keys, alike, strict=True)
    ):
        return keys
    chosen: list[Key | None] = []
    for fits in alike:
        chosen.append(next((key for key in fits if key not in chosen), None))
    return chosen


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(torch.equal(a, b)) or bool((torch.isnan(a) & torch.isnan(b) | (a == b)).all())

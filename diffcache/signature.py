"""Finds the noisy input, the timestep and the conditioning among the arguments of a forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

TIMESTEP_NAMES = ("timestep", "timesteps", "t", "time_step", "sigma", "noise_level", "time")


@dataclass(slots=True)
class Call:
    """One call of a denoiser, by name."""

    inputs: tuple[Tensor, ...]
    timestep: float | None  # None: it differs within the batch, so there is no one time
    conditioning: tuple[tuple[str, Tensor], ...]
    options: tuple[tuple[str, Any], ...]
    arguments: Mapping[str, Any] = field(default_factory=dict)  # all of them, by name

    @property
    def hidden_states(self) -> Tensor:
        """The noisy input (the first, where a model takes a list of them)."""
        return self.inputs[0]


class CallSignature:
    """Binds the arguments of a class's `forward` to names without `inspect.Signature.bind` (slow).

    Raises:
        ValueError: the forward takes nothing that could be a timestep.
    """

    def __init__(self, forward: Callable[..., Any], owner: str) -> None:
        parameters = list(inspect.signature(forward).parameters.values())[1:]  # without self
        self.names = tuple(
            p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        )
        self.timestep = next((name for name in TIMESTEP_NAMES if name in self.names), None)
        if self.timestep is None:
            raise ValueError(
                f"{owner}.forward takes no timestep (one of {', '.join(TIMESTEP_NAMES)}); "
                "give it a wrapper module whose forward names one"
            )
        self.hidden_states = next((name for name in self.names if name != self.timestep), "")

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """The call by name.

        Raises:
            TypeError: the noisy input is missing, or neither a tensor nor a list of tensors.
        """
        arguments = {**dict(zip(self.names, args, strict=False)), **kwargs}
        inputs = tensor_list(arguments.get(self.hidden_states))
        if not inputs:
            raise TypeError(f"{self.hidden_states} must be a tensor or a list of tensors")
        timestep = arguments.get(str(self.timestep))
        conditioning: list[tuple[str, Tensor]] = []
        options: list[tuple[str, Any]] = []
        for name, value in arguments.items():
            if name in (self.hidden_states, self.timestep):
                continue
            tensors = tensor_list(value)
            if isinstance(value, Mapping):
                tensors = tuple(item for item in value.values() if isinstance(item, Tensor))
            if tensors:
                conditioning += [] if is_stream(name) else [(name, tensor) for tensor in tensors]
            elif is_option(value):
                options.append((name, tuple(value) if isinstance(value, list) else value))
        found = tuple(conditioning), tuple(options)
        return Call(inputs, scalar_time(timestep), *found, arguments)


def tensor_list(value: Any) -> tuple[Tensor, ...]:
    """A tensor, or a list or tuple of nothing but tensors, as a tuple; else ()."""
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (list, tuple)) and all(isinstance(item, Tensor) for item in value):
        return tuple(value)
    return ()


def is_option(value: Any) -> bool:
    """Whether a value tells passes apart, as `return_dict` or a list of skipped layers does."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, (int, str)) for item in value)
    return isinstance(value, (bool, str))


def is_stream(name: str) -> bool:
    """Whether an argument of this name changes at every step: a second noisy stream, a time."""
    noisy = name.endswith("hidden_states") and not name.startswith(("encoder", "text", "image"))
    return noisy or "timestep" in name or "sigma" in name


def scalar_time(timestep: Any) -> float | None:
    """One number for a timestep given as a number, `[]`, `[batch]` or `[batch, tokens]`; None if
    they differ.

    Zeros beside one other value are allowed: image-to-video models give their first frame's tokens
    time 0.
    """
    if not isinstance(timestep, Tensor):
        return None if timestep is None else float(timestep)
    if timestep.numel() == 0:
        return None
    if timestep.numel() == 1 or not any(
        stride and size > 1 for stride, size in zip(timestep.stride(), timestep.shape, strict=True)
    ):
        return float(timestep[(0,) * timestep.dim()])
    values = timestep.unique().tolist()
    values = [value for value in values if value != 0] or values
    return float(values[0]) if len(values) == 1 else None

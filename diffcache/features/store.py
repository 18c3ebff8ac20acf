"""The store: every tensor that is held between calls, counted to the byte, within a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..parts import check_count
from .base import Part, part

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@part("store")
@dataclass(frozen=True, kw_only=True)
class Store(Part):
    """How tensors are held.

    Attributes:
        max_bytes: bytes that one denoiser may hold, never exceeded; None for no bound.
        dtype: storage type; None keeps the model's.
        device: "cpu" moves the history off the accelerator; None keeps it where it was made.
    """

    max_bytes: int | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_bytes is not None:
            check_count("max_bytes", self.max_bytes, 0)
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(
                f"dtype must be one of {', '.join(DTYPES)} or None, got {self.dtype!r}"
            )
        if self.device is not None:
            try:
                torch.device(self.device)
            except RuntimeError:
                raise ValueError(
                    f"device must be one that torch knows, got {self.device!r}"
                ) from None


class TensorStore:
    """The ledger of one denoiser: what its cells hold now and held at most, in bytes."""

    def __init__(self, settings: Store) -> None:
        self.settings = settings
        self.bytes_held = 0
        self.bytes_peak = 0
        self.refused = 0  # bytes of the smallest tensor that did not fit

    def nbytes(self, tensor: Tensor) -> int:
        """What `tensor` (any shape) will take here."""
        return tensor.numel() * self._dtype(tensor).itemsize

    def fits(self, nbytes: int) -> bool:
        limit = self.settings.max_bytes
        return limit is None or self.bytes_held + nbytes <= limit

    def put(self, tensor: Tensor, owned: bool = False) -> Tensor | None:
        """An own, compact copy of `tensor` in the store's form, or None where it does not fit.

        With `owned` a tensor that already has that form is taken as it is.
        """
        nbytes = self.nbytes(tensor)
        if not self.fits(nbytes):
            self.refused = min(self.refused or nbytes, nbytes)
            return None
        device = torch.device(self.settings.device) if self.settings.device else tensor.device
        dtype = self._dtype(tensor)
        if owned and tensor.dtype == dtype and tensor.device == device and _compact(tensor):
            held = tensor
        else:
            held = torch.empty(tensor.shape, dtype=dtype, device=device)
            held.copy_(tensor.detach())
        self.bytes_held += nbytes
        self.bytes_peak = max(self.bytes_peak, self.bytes_held)
        return held

    def drop(self, tensor: Tensor) -> None:
        """Takes a tensor that `put` returned off the ledger."""
        self.bytes_held -= tensor.numel() * tensor.element_size()

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        if self.settings.dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        return DTYPES[self.settings.dtype]


def _compact(tensor: Tensor) -> bool:
    """Whether the tensor fills its storage, so that holding it holds nothing else."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()

"""Forms in which a key or a value lies in a store: as it is, or in 8, 4 or 2 bits per number.

A token is coded by itself, so tokens can be picked, dropped and reordered in coded form; it is
coded once, and reading never codes again.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

Planes = tuple[Tensor, ...]  # each [tokens..., n]


@dataclass(frozen=True, kw_only=True)
class Codec:
    """A form; this one is the tensor itself."""

    @property
    def name(self) -> str:
        return "full"

    def encode(self, x: Tensor) -> Planes:
        """`x` [..., head_dim] as planes [..., n] that can be indexed by token."""
        return (x,)

    def decode(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        return planes[0].to(dtype)

    def nbytes(self, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one key or value."""
        return head_dim * dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Integer(Codec):
    """Asymmetric integers with one fp16 scale and one fp16 least value for each token and head.

    Attributes:
        bits: 8, 4 or 2 per number.
        block: size of the Hadamard blocks that spread outliers before coding, a power of two; 0
            for none. Heads that they do not divide have smaller ones.

    A token with a number that is not finite, or beyond fp16's range, reads back as NaN: visible.
    Source: block-Hadamard rotation as in QuaRot, arXiv 2404.00456.
    """

    bits: int = 4
    block: int = 64

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    def encode(self, x: Tensor) -> Planes:
        x = hadamard(x.float(), self.block)
        low = x.amin(-1, keepdim=True)
        top = 2**self.bits - 1
        scale = (x.amax(-1, keepdim=True) - low) / top
        scale, low = scale.half(), low.half()
        step = scale.float().clamp(min=torch.finfo(torch.float32).tiny)
        codes = ((x - low.float()) / step).nan_to_num(nan=0.0).round().clamp(0, top)
        return _pack(codes.to(torch.uint8), self.bits), scale, low

    def decode(self, planes: Planes, dtype: torch.dtype) -> Tensor:
        packed, scale, low = planes
        numbers = _unpack(packed, self.bits).float() * scale.float() + low.float()
        return hadamard(numbers, self.block).to(dtype)

    def nbytes(self, head_dim: int, dtype: torch.dtype) -> int:
        return head_dim * self.bits // 8 + 4


def hadamard(x: Tensor, block: int) -> Tensor:
    """`x` [..., n] in the normalised Hadamard basis of blocks; the same again undoes it.

    Blocks have the largest power of two as size that divides n, up to `block`.
    """
    size = min(block, x.shape[-1] & -x.shape[-1])  # the largest power of two that divides it
    if size <= 1:
        return x
    basis = _basis(size).to(x)
    return (x.reshape(*x.shape[:-1], -1, size) @ basis).reshape(x.shape)


@functools.lru_cache(maxsize=8)
def _basis(size: int) -> Tensor:
    """Sylvester's matrix, symmetric and orthogonal."""
    basis: Tensor = torch.ones(1, 1)
    while basis.shape[0] < size:
        basis = torch.cat([torch.cat([basis, basis], 1), torch.cat([basis, -basis], 1)])
    normalised: Tensor = basis / size**0.5
    return normalised


def _pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., n] of small numbers as uint8 [..., n * bits / 8]."""
    each = 8 // bits
    if each == 1:
        return codes
    shifts = torch.arange(each, device=codes.device, dtype=torch.uint8) * bits
    grouped = codes.reshape(*codes.shape[:-1], -1, each)
    packed: Tensor = (grouped << shifts).sum(-1, dtype=torch.uint8)
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    each = 8 // bits
    if each == 1:
        return packed
    shifts = torch.arange(each, device=packed.device, dtype=torch.uint8) * bits
    codes: Tensor = (packed[..., None] >> shifts) & (2**bits - 1)
    return codes.flatten(-2)

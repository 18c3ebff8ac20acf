"""How a key or a value is stored: a float type, or eight bits with a scale per token and head.

A token is coded once, when it is written; reading never codes again, so the error does not drift.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Storage name -> its type and the largest number that it holds.
SCALED = {"float8_e4m3": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
STORAGE = (*FLOATS, *SCALED)


def storage_dtype(storage: str) -> torch.dtype:
    return FLOATS[storage] if storage in FLOATS else SCALED[storage][0]


def token_nbytes(storage: str, head_dim: int) -> int:
    """Bytes of one head of one token: the numbers, and the fp32 scale where there is one."""
    scale = 4 if storage in SCALED else 0
    return head_dim * storage_dtype(storage).itemsize + scale


def encode(x: Tensor, storage: str) -> tuple[Tensor, Tensor | None]:
    """`x` [..., head_dim] in its stored form, and its scale [..., 1] in fp32 or None.

    The scale maps the largest magnitude of a token's head to the largest number of the type. A
    token that is not finite reads back as NaN in the whole head: visible, never a wrong number.
    """
    if storage in FLOATS:
        return x.to(FLOATS[storage]), None
    dtype, largest = SCALED[storage]
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True) / largest
    # Zeros divide by the smallest normal number. An infinite or NaN scale makes all it scales NaN.
    scale = scale.clamp(min=torch.finfo(torch.float32).tiny)
    coded = (x / scale).nan_to_num(nan=0.0).clamp(-largest, largest)
    return (coded.round() if storage == "int8" else coded).to(dtype), scale


def decode(coded: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The tensor that `encode` stored, as `dtype`; itself where it already is that."""
    if scale is None:
        return coded.to(dtype)
    return (coded.float() * scale).to(dtype)


def storage_error(x: Tensor, storage: str) -> float:
    """How far storing `x` [..., head_dim] moves it from what bfloat16 holds.

    The root of the mean square of the difference over that of `x` in bfloat16; 0 for no numbers.
    """
    held = x.to(torch.bfloat16).float()
    read = decode(*encode(held, storage), torch.float32)
    return float((read - held).norm() / held.norm().clamp(min=torch.finfo(torch.float32).tiny))

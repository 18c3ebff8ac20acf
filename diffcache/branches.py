"""Names the passes of one step (cond, uncond, ...) by what they are conditioned on."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class BranchNames:
    """Names branches by what they are conditioned on, never by counting calls."""

    MAX_BRANCHES = 16

    def __init__(self) -> None:
        self._digests: dict[int, tuple[weakref.ref[Tensor], Any, str]] = {}
        self._names: dict[Any, str] = {}

    def begin(self) -> None:
        """Names are given anew from here on."""
        self._names.clear()

    def digest(self, conditioning: Sequence[tuple[str, Tensor]]) -> tuple[Any, ...]:
        """Content digests by name; only tensors not seen before are read."""
        return tuple((name, self._of(tensor)) for name, tensor in conditioning)

    def name(self, key: tuple[Any, ...]) -> str:
        """ "branch 0" for the first conditioning, "branch 1" for the next other one, and so on."""
        if key not in self._names:
            if len(self._names) >= self.MAX_BRANCHES:
                self._names.clear()
            self._names[key] = f"branch {len(self._names)}"
        return self._names[key]

    def _of(self, tensor: Tensor) -> str:
        version = content_sum(tensor) if tensor.is_inference() else tensor._version
        known = self._digests.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        digest = content_digest(tensor)
        if len(self._digests) > 256:
            self._digests = {k: v for k, v in self._digests.items() if v[0]() is not None}
        self._digests[id(tensor)] = (weakref.ref(tensor), version, digest)
        return digest


def content_sum(tensor: Tensor) -> Any:
    """What changes when an inference tensor, which counts no versions, is written to."""
    if tensor.is_meta or not tensor.is_floating_point():
        return content_digest(tensor)
    norm = torch.linalg.vector_norm(tensor, dtype=torch.float32)
    return float(tensor.sum(dtype=torch.float32)), float(norm)


def content_digest(tensor: Tensor) -> str:
    """Digest of shape, dtype and content; a meta tensor has no content."""
    head = f"{tuple(tensor.shape)}{tensor.dtype}{tensor.device}"
    if tensor.is_meta:
        return head
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return head + hashlib.blake2b(raw.tobytes(), digest_size=16).hexdigest()

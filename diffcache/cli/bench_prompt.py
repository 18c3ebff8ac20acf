"""Encodes a prompt once for all methods of the bench, where the pipeline takes the result."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

GIVEN = ("prompt_embeds", "negative_prompt_embeds")
ENCODED = ("prompt", "do_classifier_free_guidance")  # what encode_prompt must take


class Prompts:
    """The arguments that stand for a prompt in a pipeline's call: the last one is kept."""

    def __init__(self, pipe: Any, arguments: Mapping[str, Any]) -> None:
        self.pipe, self.arguments = pipe, arguments
        self.takes = inspect.signature(type(pipe).__call__).parameters
        encode = getattr(pipe, "encode_prompt", None)
        self.encodes = inspect.signature(encode).parameters if encode is not None else {}
        self.last: tuple[str, dict[str, Any]] | None = None

    def given(self, prompt: str) -> dict[str, Any]:
        """{"prompt_embeds": ..., "negative_prompt_embeds": ...}, or {"prompt": prompt}."""
        if self.last is None or self.last[0] != prompt:
            self.last = prompt, self._encoded(prompt) or {"prompt": prompt}
        return dict(self.last[1])

    def _encoded(self, prompt: str) -> dict[str, Any] | None:
        """None where the pipeline encodes in another form than a pair of tensors."""
        if not all(name in self.takes for name in GIVEN):
            return None
        if not all(name in self.encodes for name in ENCODED):
            return None
        # By the call's defaults: encode_prompt's own may be others (Wan: 226 tokens, not 512).
        defaults = {n: p.default for n, p in self.takes.items() if p.default is not p.empty}
        shared = {n: v for n, v in {**defaults, **self.arguments}.items() if n in self.encodes}
        own = {"prompt": prompt, "do_classifier_free_guidance": self._guided()}
        with torch.no_grad():  # as the pipeline's call does
            found = self.pipe.encode_prompt(**{**shared, **own})
        pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], Tensor)
        if not pair or not (found[1] is None or isinstance(found[1], Tensor)):
            return None
        return dict(zip(GIVEN, found, strict=True))

    def _guided(self) -> bool:
        default = self.takes["guidance_scale"].default if "guidance_scale" in self.takes else 1.0
        return float(self.arguments.get("guidance_scale", default)) > 1

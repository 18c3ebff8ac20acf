"""Denoisers and pipelines small enough to run hundreds of times, shared by the tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import diffcache

TIMES = [1000.0 - 50 * i for i in range(12)]
SITES = ["model", "stack", "span", "block"]
COND, UNCOND = 2 * torch.ones(1, 1, 6), -2 * torch.ones(1, 1, 6)
TEXT_DIM = 16
TINY_WAN = {
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": TEXT_DIM,
    "freq_dim": 16,
    "ffn_dim": 32,
    "rope_max_seq_len": 32,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
}


class Block(nn.Module):
    """h + tanh(W h + text) / 2."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, hidden_states, text):
        return hidden_states + torch.tanh(self.linear(hidden_states) + text) / 2


class Bare(nn.Module):
    """A denoiser of one's own, called (x, t, cond); x is [batch, tokens, 6]."""

    def __init__(self, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.layers = nn.ModuleList(Block() for _ in range(4))
        self.requires_grad_(False)

    def forward(self, x, t, cond, *, skip_layers=None, control=None, **others):
        x = x + t / 1000
        for i, layer in enumerate(self.layers):
            if not skip_layers or i not in skip_layers:
                x = layer(x, cond)
        return x if control is None else x + control


class Layer(nn.Module):
    """tanh(W h) / 2."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x)) / 2


class Base(nn.Module):
    """Seeded, frozen, with a list of blocks of one class."""

    block = Layer

    def __init__(self, depth=4):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(self.block() for _ in range(depth))
        self.requires_grad_(False)


class OneStream(Layer):
    def forward(self, x, cond):
        return x + super().forward(x + cond)


class Own(Base):
    """Called (x, t, cond), as many research models are."""

    block = OneStream

    def forward(self, x, t, cond):
        x = x + t / 1000
        for block in self.blocks:
            x = block(x, cond)
        return x


def start(*shape: int, seed: int = 0) -> torch.Tensor:
    """Seeded noise."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def latents(batch=1, seed=0, tokens=5):
    return start(batch, tokens, 6, seed=seed)


def drive(module, passes, times=TIMES, x=None, seed=0):
    """An Euler loop; `passes(step)` lists the keyword arguments of each call. Outputs by step."""
    x = latents(seed=seed) if x is None else x
    outputs = []
    for step, t in enumerate(times):
        found = [module(x, t, **call) for call in passes(step)]
        outputs.append(found)
        x = x - found[0] / len(times)
    return outputs


def rows(target: Any, branch: str | None = None) -> list[Any]:
    """The rows of the last run, of one branch or of all."""
    return [row for row in diffcache.report(target).rows if branch in (None, row.branch)]


def reused(target: Any) -> int:
    """How many rows of the last run are reuses."""
    return sum(row.decision == "reuse" for row in rows(target))


def equal(a, b):
    """Whether two lists of outputs, or of lists of outputs, are the same to the bit."""
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else equal(x, y)
        for x, y in zip(a, b, strict=True)
    )


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The relative L1 distance of `a` from `b`."""
    return float((a - b).abs().mean() / b.abs().mean())


def far(a, b):
    """The largest relative L1 distance of outputs at one step."""
    return max(apart(x, y) for x, y in zip(a, b, strict=True))


def fitting(name: str) -> diffcache.Policy:
    """The registered policy with what it needs on a tiny model: few blocks in front, a curve."""
    policy = diffcache.get_policy(name)
    known, needed = policy.settings(), {"front": 1, "curves": (("cond", (1.0, 0.0), (1.0, 0.8)),)}
    if known.get("front", 0) <= 1:
        del needed["front"]
    return policy.with_settings(**{key: needed[key] for key in needed if key in known})


def lively(name: str, **settings: Any) -> diffcache.Policy:
    """That with a short warm-up and a loose threshold too: it skips on tiny models."""
    policy = fitting(name)
    known = policy.settings()
    loose: dict[str, Any] = {"warmup_steps": min(2, known["warmup_steps"])}
    if "threshold" in known:
        loose["threshold"] = 0.6
    return policy.with_settings(**loose, **settings)


def fill_zeros(module: nn.Module) -> nn.Module:
    """Random values in place of parameters that start at zero and would hide what goes in there."""
    for parameter in module.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return module.eval()


def every_second_chunk() -> diffcache.Policy:
    """Holds each step's output of the chunk before, in every second chunk."""
    return diffcache.Policy(
        name="every second chunk",
        site="model",
        gate={"kind": "interval", "interval": 2},
        predictor="hold",
        axis="chunk",
        guards={"kind": "guards", "warmup_steps": 0, "min_steps": 0},
        exact={"interval": 1},
    )

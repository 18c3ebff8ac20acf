"""A toy denoiser, an Euler loop around it, and what rules written by hand are compared on."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch
from torch import nn

import diffcache

SHIFT = 3.0


class ToyBlock(nn.Module):
    """h + tanh(W h) / 2, a little more at some noise levels."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, hidden_states, time):
        return hidden_states + 0.5 * torch.tanh(self.linear(hidden_states) + 0.3 * time)


class ToyModel(nn.Module):
    """Four blocks on [batch, tokens, width]."""

    def __init__(self, seed=0, width=6, depth=4):
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(ToyBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, width)
        self.requires_grad_(False)

    def forward(self, hidden_states, timestep):
        time = timestep / 1000
        for block in self.blocks:
            hidden_states = block(hidden_states, time)
        return self.head(hidden_states)


class ToyPipe:
    """As much of a diffusers pipeline as wrap asks for, and an Euler loop."""

    def __init__(self, seed=0):
        self.transformer = ToyModel(seed)
        self.scheduler = SimpleNamespace(timesteps=None, sigmas=None)

    @property
    def components(self):
        return {"transformer": self.transformer, "scheduler": self.scheduler}

    def __call__(self, steps, seed=1):
        x = noise(seed)
        levels = sigmas(steps)
        self.scheduler.sigmas = levels
        self.scheduler.timesteps = levels[:-1] * 1000
        for sigma, after in itertools.pairwise(levels):
            x = x + (after - sigma) * self.transformer(x, timestep=sigma * 1000)
        return x


def noise(seed):
    return torch.randn(1, 5, 6, generator=torch.Generator().manual_seed(seed))


def sigmas(steps):
    plain = torch.linspace(1, 0, steps + 1)
    return SHIFT * plain / (1 + (SHIFT - 1) * plain)


def skipped(pipe):
    """Whether each call of the last run was a reuse."""
    return [row.decision == "reuse" for row in diffcache.report(pipe).rows]


def mean(tensor):
    return float(tensor.abs().mean())

"""What both trainings share: Muon beside AdamW, averages, a schedule by the clock."""

import json
import math
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Mixed:
    """Muon for weight matrices (kernels seen as matrices), AdamW for everything else."""

    def __init__(
        self, matrices: Iterable[Tensor], others: Iterable[Tensor], *, muon: float, adam: float
    ) -> None:
        self.pairs = [(w, nn.Parameter(w.data.view(w.shape[0], -1))) for w in matrices]
        flat = [view for _, view in self.pairs]
        self.muon = torch.optim.Muon(
            flat, lr=muon, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        )
        self.adam = torch.optim.AdamW(list(others), lr=adam, weight_decay=0.0, betas=(0.9, 0.98))
        self.base = {"muon": muon, "adam": adam}

    def step(self, factor: float) -> None:
        """One update with both learning rates scaled by `factor`; gradients are consumed."""
        for weight, view in self.pairs:
            view.grad = weight.grad.view_as(view)
            weight.grad = None
        for name, optimizer in (("muon", self.muon), ("adam", self.adam)):
            for group in optimizer.param_groups:
                group["lr"] = self.base[name] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict:
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


class Average:
    """Exponential moving average of a module's parameters, shorter at the beginning."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay, self.steps = decay, 0
        self.weights = {name: w.detach().clone() for name, w in module.state_dict().items()}

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        for name, weight in module.state_dict().items():
            self.weights[name].lerp_(weight, 1 - decay)


def schedule(
    elapsed: float, total: float, *, step: int, warmup: int = 20, decay: float = 0.5
) -> float:
    """Learning-rate factor: linear warm-up in steps, flat, cosine to zero at the end.

    `decay` is the share of the time that the fall takes.
    """
    left = max(0.0, 1 - elapsed / total) / decay
    return min(1.0, (step + 1) / warmup) * (0.5 - 0.5 * math.cos(math.pi * min(1.0, left)))


def join_group() -> tuple[int, int]:
    """Rank and world size; joins a gloo group when torchrun started several processes."""
    if not dist.is_torchelastic_launched():
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def average_gradients(parameters: list[Tensor], elapsed: float) -> float:
    """Average the gradients over the group in one message.

    Returns rank 0's clock, so that all stop together.
    """
    for weight in parameters:
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    if not dist.is_initialized():
        return elapsed
    clock = torch.tensor([elapsed if dist.get_rank() == 0 else 0.0])
    flat = torch.cat([clock, *(w.grad.flatten() for w in parameters)])
    dist.all_reduce(flat)
    grads = flat[1:].div_(dist.get_world_size()).split([w.numel() for w in parameters])
    for weight, grad in zip(parameters, grads, strict=True):
        weight.grad.copy_(grad.view_as(weight))
    return float(flat[0])


def log(path: Path, start: float, **values: float) -> None:
    """Append one JSON line."""
    row = {"minutes": round((time.time() - start) / 60, 2), **values}
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(row, flush=True)

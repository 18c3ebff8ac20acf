"""Every registered policy, tuned so that it skips on a tiny model, and what the invariants need."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import fitting, lively

import diffcache
from diffcache.api import _states

DEMO = Path(__file__).parents[2] / "samples" / "models" / "demo-wan"


@pytest.fixture(scope="session", autouse=True)
def one_thread_here() -> None:
    """Sums then add up in one order, so equal runs are bit-identical."""
    torch.set_num_threads(1)


@pytest.fixture
def run(run_tiny) -> Callable[..., torch.Tensor]:
    """`run_tiny` at 9 steps: the fewest that are cached are 8."""
    return partial(run_tiny, steps=9)


_plain: dict[Any, torch.Tensor] = {}


@pytest.fixture
def plain(tiny_wan, run) -> Callable[..., torch.Tensor]:
    """What `run` gives on a pipeline without us, made once for each set of arguments."""

    def outputs(**call: Any) -> torch.Tensor:
        key = tuple(sorted(call.items()))
        if key not in _plain:
            _plain[key] = run(tiny_wan(), **call)
        return _plain[key].clone()

    return outputs


@pytest.fixture(autouse=True)
def no_gradients():
    """As in a pipeline call: a forward that records gradients is never cached."""
    with torch.no_grad():
        yield


def one_of_each(**same: Any) -> list[Any]:
    """All policies; those that are another one with other values only run with -m slow."""
    seen, params = [], []
    for name in diffcache.policies():
        policy = diffcache.get_policy(name)
        known = {key: value for key, value in same.items() if key in policy.settings()}
        parts = policy.with_settings(**known).parts() if name != "exact" else policy.parts()
        params.append(pytest.param(name, marks=[pytest.mark.slow] if parts in seen else []))
        seen.append(parts)
    return params


@pytest.fixture(params=one_of_each(fraction=0.4))
def policy(request) -> diffcache.Policy:
    """Each registered policy; all but "exact" skip some steps of a run of 12."""
    return lively(request.param)


@pytest.fixture(params=one_of_each(fraction=1.0))
def exact_policy(request) -> diffcache.Policy:
    """Each registered policy with the settings that it says are exact."""
    policy = fitting(request.param)
    return policy.with_settings(**policy.exact)


@pytest.fixture
def skips() -> Callable[[diffcache.Policy], bool]:
    """Whether a policy is meant to skip anything at all."""
    return lambda policy: policy.with_settings(**policy.exact) != policy


@pytest.fixture
def decisions() -> Callable[..., list[tuple[Any, ...]]]:
    """What the last run decided: (module, branch, step, decision) of every row."""

    def read(target: Any) -> list[tuple[Any, ...]]:
        rows = diffcache.report(target).rows
        return [(row.module, row.branch, row.step, row.decision) for row in rows]

    return read


@pytest.fixture
def reused(decisions) -> Callable[[Any], int]:
    """How many rows of the last run are reuses."""
    return lambda target: sum(row[-1] == "reuse" for row in decisions(target))


@pytest.fixture
def ledgers() -> Callable[[Any], list[Any]]:
    """The states of a wrapped target; `.store` has `bytes_held`."""
    return _states


@pytest.fixture
def bytes_alive() -> Callable[[Any], int]:
    """Bytes of all storages that a state reaches, however it does; scalars and timesteps apart."""
    return _bytes_alive


def _bytes_alive(state: Any) -> int:
    storages: dict[int, int] = {}
    seen: set[int] = set()
    stack = [state.cells, state.site, state.store, state.recorder]
    while stack:
        item = stack.pop()
        known = isinstance(item, (nn.Module, type, str, bytes, int, float)) or callable(item)
        if known or item is state or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            storage = item.untyped_storage()
            if item.dim():
                storages[storage.data_ptr()] = storage.nbytes()
            continue
        stack += gc.get_referents(item)
    token = state.recorder.token
    timesteps = 0 if token is None else token.untyped_storage().nbytes()
    return sum(storages.values()) - timesteps


@pytest.fixture
def loop() -> Callable[..., list[torch.Tensor]]:
    """Calls a denoiser by hand, one branch, Euler steps over given times; the outputs."""
    return _loop


def _loop(
    module: nn.Module,
    times: torch.Tensor,
    *,
    seed: int = 0,
    batch: int = 1,
    each: Callable[[int, Any], torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    **call: Any,
) -> list[torch.Tensor]:
    """Outputs are cloned before `each(step, output)` may touch what the denoiser returned."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, 4, 2, 8, 8, generator=generator).to(dtype)
    text = torch.randn(batch, 6, 16, generator=generator).to(dtype)
    outputs = []
    for step, t in enumerate(times):
        given = x.clone()
        out = module(
            hidden_states=given,
            timestep=t.expand(batch),
            encoder_hidden_states=text,
            return_dict=False,
            **call,
        )[0]
        outputs.append(out.clone())
        x = x - out / len(times)
        if each is not None:
            each(step, (given, out))
    return outputs


@pytest.fixture(scope="session")
def loaded_demo():
    """The trained demo pipeline in fp32, loaded once; skipped while its folder is missing."""
    if not (DEMO / "transformer" / "diffusion_pytorch_model.safetensors").is_file():
        pytest.skip("samples/models/demo-wan is not there yet: run samples/train first")
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(DEMO, torch_dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="session")
def run_demo(loaded_demo) -> Callable[..., torch.Tensor]:
    """Runs a copy of the demo pipeline on one prompt; the text is encoded once. Latents."""
    prompt, negative = loaded_demo.encode_prompt(
        "a red circle moving left on a grey background", max_sequence_length=32
    )

    def run(pipe: Any, steps: int = 10, seed: int = 0, **call: Any) -> torch.Tensor:
        return pipe(
            prompt_embeds=prompt,
            negative_prompt_embeds=negative,
            height=64,
            width=64,
            num_frames=17,
            num_inference_steps=steps,
            guidance_scale=2.0,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
            **call,
        ).frames

    return run


@pytest.fixture(scope="session")
def demo_plain(loaded_demo, run_demo) -> torch.Tensor:
    """What the demo pipeline gives without us in 10 steps."""
    return run_demo(loaded_demo)

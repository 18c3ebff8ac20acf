"""A compressed cache goes on in another process, and copies go their own way."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_llms
import torch

import diffcache

PROGRAM = """
import sys
import torch, tiny_llms, diffcache
torch.set_num_threads(1)
model = diffcache.wrap(tiny_llms.llama(), "keydiff")
cache = diffcache.load_cache(sys.argv[1], model)
with torch.no_grad():
    logits = model(tiny_llms.ids(1, 5, 2), cache=cache).logits
torch.save((logits, cache.get_seq_length(), cache.nbytes, cache.kv_policy.name), sys.argv[2])
"""


@torch.no_grad()
def filled(name: str, make: Any = tiny_llms.llama, **settings: Any) -> tuple[Any, Any]:
    model = diffcache.wrap(make(), name, **settings)
    return model, model(tiny_llms.ids(1, 160)).cache


@pytest.mark.parametrize("name", diffcache.kv.kv_policies())
def test_a_loaded_cache_answers_as_the_one_that_was_saved(name: str, tmp_path: Path) -> None:
    model, cache = filled(name)
    cache.save(tmp_path / "cache.safetensors")
    loaded = diffcache.load_cache(tmp_path / "cache.safetensors", model)
    assert loaded.nbytes == cache.nbytes and loaded.kv_policy == cache.kv_policy
    with torch.no_grad():
        for turn in (tiny_llms.ids(1, 5, 2), tiny_llms.ids(1, 1, 3), tiny_llms.ids(1, 40, 4)):
            logits = [model(turn, cache=one).logits for one in (cache, loaded)]
            assert torch.equal(*logits)
    assert [core.rows for core in cache.cores] == [core.rows for core in loaded.cores]


def test_another_process_goes_on(tmp_path: Path, repo_root: Path) -> None:
    model, cache = filled("balanced")
    cache.save(tmp_path / "cache.safetensors")
    with torch.no_grad():
        here = model(tiny_llms.ids(1, 5, 2), cache=cache).logits
    paths = [str(tmp_path / name) for name in ("cache.safetensors", "there.pt")]
    shared = {"PYTHONPATH": str(repo_root / "tests" / "shared"), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *paths],
        cwd=repo_root,
        env={**os.environ, **shared},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    there, seen, bytes_held, name = torch.load(paths[1])
    assert torch.equal(here, there) and (seen, bytes_held, name) == (165, cache.nbytes, "balanced")


def test_what_is_no_cache_says_so(tmp_path: Path) -> None:
    model, cache = filled("keydiff")
    path = tmp_path / "cache.safetensors"
    with pytest.raises(FileNotFoundError, match="there is no cache file"):
        diffcache.load_cache(path, model)
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"cache\.safetensors: not a compressed cache, or damaged"):
        diffcache.load_cache(path, model)
    cache.save(path)
    with pytest.raises(ValueError, match=r"the cache is of a model .*llama.*this one is .*qwen3"):
        diffcache.load_cache(path, diffcache.wrap(tiny_llms.qwen3(), "keydiff"))
    with pytest.raises(ValueError, match="not wrapped"):
        diffcache.load_cache(path, tiny_llms.llama())


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    _, cache = filled("keydiff")
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    before = path.read_bytes()
    from diffcache.pipelines import llm_files

    def full(*args: Any) -> None:
        Path(args[1]).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(llm_files, "save_file", full)
    with pytest.raises(OSError, match="no space"):
        cache.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_copy_shares_the_model_and_nothing_else() -> None:
    model, cache = filled("expectedattention")
    twin = copy.deepcopy(cache)
    mine, theirs = (
        {t.untyped_storage().data_ptr() for t in one.tensors().values()} for one in (cache, twin)
    )
    assert not mine & theirs
    assert all(a.facts is b.facts for a, b in zip(cache.cores, twin.cores, strict=True))
    with torch.no_grad():
        model(tiny_llms.ids(1, 3, 2), cache=twin)
    assert (cache.get_seq_length(), twin.get_seq_length()) == (160, 163)

"""Where pipelines come from, and what is said when they do not come."""

import shutil
import socket

import pytest
import torch

from diffcache.cli.loading import load_pipeline, local_folder, pipeline_class


@pytest.fixture
def no_network(monkeypatch):
    """Every attempt to connect is written down and fails."""
    tried = []

    def refuse(self, address):
        tried.append(address)
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: tried.append(a) or [])
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return tried


def test_a_folder_is_read_without_the_network(tiny_demo, no_network):
    pipe = load_pipeline(str(tiny_demo), device="cpu")
    assert type(pipe).__name__ == "WanPipeline"
    assert no_network == []
    modules = (pipe.transformer, pipe.vae, pipe.text_encoder)
    assert {module.dtype for module in modules} == {torch.float32}


def test_the_dtype_reaches_every_part(tiny_demo):
    pipe = load_pipeline(tiny_demo, dtype="bfloat16", device="cpu")
    modules = (pipe.transformer, pipe.vae, pipe.text_encoder)
    assert {module.dtype for module in modules} == {torch.bfloat16}


def test_offload_keeps_parts_off_the_device_until_called(tiny_demo):
    """With "cpu" as the only device, what can be seen is that the parts' hooks are on."""
    pipe = load_pipeline(tiny_demo, device="offload")
    assert hasattr(pipe.transformer, "_hf_hook") and hasattr(pipe.vae, "_hf_hook")
    assert not hasattr(load_pipeline(tiny_demo, device="cpu").transformer, "_hf_hook")


def test_the_word_demo_is_the_packaged_model(tiny_demo, monkeypatch, tmp_path):
    monkeypatch.setattr("diffcache.cli.loading.demo_model_path", lambda: tiny_demo)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert local_folder("demo") == tiny_demo
    with pytest.raises(ValueError, match=r"holds no model_index\.json"):
        local_folder("./demo")


def test_the_class_is_known_without_weights(tiny_demo, tmp_path):
    shutil.copy(tiny_demo / "model_index.json", tmp_path)
    assert pipeline_class(tmp_path).__name__ == "WanPipeline"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "holds no model_index.json"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ("{}", "damaged"),
        ('{"_class_name": "WanPipelin"}', "does not know"),
        ('{"_class_name": 3}', "does not know"),
    ],
)
def test_a_folder_that_is_no_pipeline_is_said_to_be_none(content, says, tmp_path):
    if content is not None:
        (tmp_path / "model_index.json").write_text(content)
    for load in (load_pipeline, pipeline_class):
        with pytest.raises(ValueError, match=says):
            load(str(tmp_path))


def test_a_single_model_is_no_pipeline(tiny_demo):
    with pytest.raises(ValueError, match="a single model is no pipeline"):
        load_pipeline(tiny_demo / "transformer")


def test_a_folder_with_a_part_missing_is_named(tiny_demo, tmp_path):
    copy = shutil.copytree(tiny_demo, tmp_path / "broken")
    (copy / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ValueError, match="broken cannot be loaded") as failed:
        load_pipeline(copy)
    assert "\n" not in str(failed.value) and len(str(failed.value)) < 600


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("no/such/folder", "there is no folder"),
        ("../elsewhere", "there is no folder"),
        ("", "there is no folder"),
        ("wan", "there is no folder"),
    ],
)
def test_what_is_neither_folder_nor_hub_id(source, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if not source:
        monkeypatch.setattr("pathlib.Path.is_dir", lambda self: False)
        monkeypatch.setattr("pathlib.Path.exists", lambda self: False)
    with pytest.raises(ValueError, match=says):
        load_pipeline(source)


def test_a_file_is_no_folder(tiny_demo):
    with pytest.raises(ValueError, match="is a file"):
        load_pipeline(tiny_demo / "model_index.json")


@pytest.mark.parametrize("load", [load_pipeline, pipeline_class])
def test_without_a_network_a_hub_id_says_so(load, no_network, tmp_path, monkeypatch):
    for module in ("file_download", "constants"):
        monkeypatch.setattr(f"huggingface_hub.{module}.HF_HUB_CACHE", str(tmp_path), raising=False)
    with pytest.raises(ValueError, match="the hub cannot be reached"):
        load("some-owner/some-model")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("GatedRepoError", "accept its terms"),
        ("RepositoryNotFoundError", "there is no folder"),
        ("RemoteEntryNotFoundError", "holds no model_index.json"),
        ("LocalEntryNotFoundError", "cannot be reached"),
    ],
)
def test_what_the_hub_refuses_is_told_apart(error, says, monkeypatch):
    import huggingface_hub.errors
    from diffusers import DiffusionPipeline

    kind = getattr(huggingface_hub.errors, error)

    def refuse(*_, **__):
        raise OSError("wrapped by diffusers") from kind.__new__(kind)

    monkeypatch.setattr(DiffusionPipeline, "from_pretrained", refuse)
    with pytest.raises(ValueError, match=says):
        load_pipeline("some-owner/some-model")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": "int8"}, "dtype must be one of auto, float32"),
        ({"device": "toaster"}, "cannot be used here"),
        ({"device": "cuda:99"}, "cannot be used here"),
    ],
)
def test_dtype_and_device_are_checked_before_anything_is_read(settings, says):
    with pytest.raises(ValueError, match=says):
        load_pipeline("no-such/model", **settings)

"""`diffcache run` as its user meets it, on a tiny model: files, figures, page, errors."""

import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from diffcache.cli.loading import load_pipeline

SHORT = ("--steps", "9", "--format", "png")
CLIP = {"prompt", "seed", "path", "frames", "height", "width", "steps", "computed", "reused"}
CLIP |= {"seconds", "seconds_total", "bytes_peak", "ideal_speedup", "notes"}
COMPARED = {"path_uncached", "seconds_uncached", "speedup", "speedup_total", "psnr", "ssim"}
COMPARED |= {"identical", "seconds_total_uncached"}


def reference(tiny_demo, prompt, seed, **more):
    """uint8 frames [F, H, W, 3] of the stock pipeline, called as its documentation says."""
    pipe = load_pipeline(tiny_demo, device="cpu")
    settings = json.loads((tiny_demo / "demo.json").read_text())
    names = ("guidance_scale", "height", "width", "num_frames", "max_sequence_length")
    call = {**{name: settings[name] for name in names}, "num_inference_steps": 9, **more}
    generator = torch.Generator().manual_seed(seed)
    frames = pipe(prompt, generator=generator, output_type="np", **call).frames[0]
    return (frames * 255).round().astype(np.uint8)


def sheet_of(frames):
    """The sheet of five frames: two rows of three."""
    blank = np.zeros_like(frames[0])
    rows = [frames[:3], [*frames[3:], blank]]
    return np.concatenate([np.concatenate(list(row), axis=1) for row in rows], axis=0)


def read(path):
    return np.asarray(Image.open(path))


def test_a_clip_for_each_prompt_and_seed(diffcache, tiny_demo, tmp_path):
    out = tmp_path / "ö ü [x]"
    ran = diffcache(
        "run", tiny_demo, "a red circle", "红色圆圈 🎈", *SHORT, "--seeds", "0,3", "--out", out
    )
    assert ran.code == 0, ran.err
    assert {path.name for path in out.iterdir()} == {
        "a-red-circle-seed0.png",
        "a-red-circle-seed3.png",
        "红色圆圈-🎈-seed0.png",
        "红色圆圈-🎈-seed3.png",
    }
    assert "policy balanced, 4 clips" in ran.out
    assert f"Clips: {out}" in ran.out.replace("\n", "")


def test_with_an_exact_policy_the_file_is_the_stock_pipelines_clip(diffcache, tiny_demo, tmp_path):
    for option, call in (((), {}), (("--negative", "blue", "--guidance", "2"), None)):
        out = tmp_path / f"x{len(option)}.png"
        options = (*SHORT, "--policy", "exact", "--seed", "5", "--out", out, *option)
        ran = diffcache("run", tiny_demo, "a red circle", *options)
        assert ran.code == 0, ran.err
        more = {"negative_prompt": "blue", "guidance_scale": 2.0} if call is None else call
        assert (read(out) == sheet_of(reference(tiny_demo, "a red circle", 5, **more))).all()


def test_compare_measures_against_the_stock_pipeline(diffcache, tiny_demo, tmp_path):
    ran = diffcache(
        *("run", tiny_demo, "a red circle", "a blue square", "--compare", "--json"),
        *("--steps", "20", "--format", "png", "--out", tmp_path),
        *("--policy", "hold", "--set", "fraction=0.3"),  # far enough off to measure in bytes
    )
    assert ran.code == 0, ran.err
    figures = ran.json()
    assert len(figures["clips"]) == 2
    for clip in figures["clips"]:
        assert set(clip) == CLIP | COMPARED
        assert 0 < clip["computed"] < clip["steps"] == clip["computed"] + clip["reused"] == 20
        assert clip["speedup"] == clip["seconds_uncached"] / clip["seconds"]
        assert clip["seconds"] < clip["seconds_total"]
        stock = reference(tiny_demo, clip["prompt"], 0, num_inference_steps=20)
        assert (read(clip["path_uncached"]) == sheet_of(stock)).all()
        assert not clip["identical"] and 10 < clip["psnr"] < 50 and 0 < clip["ssim"] < 1
        # The files tell the same, to the rounding of their bytes.
        error = read(clip["path"]).astype(float) - read(clip["path_uncached"])
        error = np.concatenate([error[:32], error[32:, :64]], axis=1)  # without the blank place
        measured = -10 * np.log10(np.square(error / 255).mean())
        assert measured == pytest.approx(clip["psnr"], abs=0.5)
    found = figures["comparison"]
    psnr = [clip["psnr"] for clip in figures["clips"]]
    assert found["psnr_min"] == min(psnr) <= found["psnr_p5"] <= found["psnr_mean"]
    assert found["psnr_mean"] == pytest.approx(sum(psnr) / 2)
    assert found["clips"] == 2 and found["speedup"] > 0 and found["speedup_total"] > 0


def test_an_exact_policy_is_identical_to_no_cache(diffcache, tiny_demo, tmp_path):
    options = ("--policy", "first_block", "--set", "threshold=0", "--compare", "--out", tmp_path)
    ran = diffcache("run", tiny_demo, "a red circle", *SHORT, *options)
    assert ran.code == 0, ran.err
    said = " ".join(ran.out.split())
    assert "identical to the uncached pipeline" in said
    assert "Note: nothing was skipped" in said


def test_settings_reach_the_policy(diffcache, tiny_demo, tmp_path):
    common = ("run", tiny_demo, "a red circle", "--steps", "20", "--json", "--policy", "hold")
    computed = []
    for fraction in (0.3, 0.8):
        out = tmp_path / f"{fraction}.png"
        ran = diffcache(*common, "--set", f"fraction={fraction}", "--out", out)
        computed.append(ran.json()["clips"][0]["computed"])
    assert computed[0] < computed[1] < 20


def test_offloaded_parts_make_the_same_clip(diffcache, tiny_demo, tmp_path):
    for device in ("cpu", "offload"):
        options = ("--device", device, "--out", tmp_path / f"{device}.png")
        ran = diffcache("run", tiny_demo, "a red circle", *SHORT, *options)
        assert ran.code == 0, ran.err
    assert (read(tmp_path / "cpu.png") == read(tmp_path / "offload.png")).all()


def test_a_policy_file_is_taken(diffcache, tiny_demo, tmp_path):
    from diffcache import get_policy

    get_policy("hold", fraction=1.0).save(tmp_path / "mine.json")
    ran = diffcache(
        *("run", tiny_demo, "a", *SHORT, "--policy", tmp_path / "mine.json"),
        *("--json", "--out", tmp_path / "x.png"),
    )
    assert ran.json()["clips"][0]["reused"] == 0


@pytest.mark.parametrize("kind", ["mp4", "gif", "png"])
def test_each_format_opens(kind, diffcache, tiny_demo, tmp_path):
    out = tmp_path / f"clip.{kind}"
    ran = diffcache("run", tiny_demo, "a", "--steps", "4", "--fps", "5", "--out", out)
    assert ran.code == 0, ran.err
    if kind == "mp4":
        import imageio_ffmpeg

        reader = imageio_ffmpeg.read_frames(str(out))
        about = next(reader)
        assert (about["fps"], about["size"], len(list(reader))) == (5, (32, 32), 5)
    else:
        image = Image.open(out)
        assert image.size == ((32, 32) if kind == "gif" else (96, 64))
        assert getattr(image, "n_frames", 1) == (5 if kind == "gif" else 1)


def test_prompts_from_a_file(diffcache, tiny_demo, tmp_path):
    file = tmp_path / "prompts ü.txt"
    file.write_bytes("\ufeffa red circle\r\n\r\n\na red circle\n".encode())
    ran = diffcache("run", tiny_demo, "--prompts", file, *SHORT, "--out", tmp_path / "o")
    assert ran.code == 0, ran.err
    names = {path.name for path in (tmp_path / "o").iterdir()}
    assert names == {"a-red-circle-seed0.png", "a-red-circle-seed0-2.png"}


def test_sizes_that_the_pipeline_rounds_are_told(diffcache, tiny_demo, tmp_path):
    options = ("--frames", "7", "--out", tmp_path, "--json", *SHORT)
    clip = diffcache("run", tiny_demo, "a", *options).json()["clips"][0]
    assert clip["frames"] == 5
    assert "asked for frames 7, the pipeline made 5" in clip["notes"]


@pytest.mark.parametrize("name", ["unipc", "euler", "heun", "dpm"])
def test_a_scheduler_by_name(name, diffcache, tiny_demo, tmp_path):
    options = ("--scheduler", name, "--compare", "--out", tmp_path, "--json", *SHORT)
    ran = diffcache("run", tiny_demo, "a", *options)
    assert ran.code == 0, ran.err
    figures = ran.json()
    assert name in figures["scheduler"].lower()
    assert figures["clips"][0]["reused"] > 0


def test_nothing_is_overwritten_without_force(diffcache, tiny_demo, tmp_path, monkeypatch):
    common = ("run", tiny_demo, "a", "b", "--steps", "3", "--format", "png", "--out", tmp_path)
    for name in ("b-seed0.png", "b-seed0-uncached.png", "page.html"):
        (tmp_path / name).write_bytes(b"mine")
    with monkeypatch.context() as patch:
        patch.setattr("diffcache.cli.loading.load_pipeline", None)  # no work is begun
        for more in ((), ("--compare",), ("--report", tmp_path / "page.html")):
            ran = diffcache(*common, *more)
            assert ran.code == 2 and "--force" in ran.err and ran.err.count("\n") == 1
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"mine"}
    ran = diffcache(*common, "--compare", "--force", "--report", tmp_path / "page.html")
    assert ran.code == 0, ran.err
    assert len(list(tmp_path.iterdir())) == 5
    assert all(path.read_bytes() != b"mine" for path in tmp_path.iterdir())


def test_a_file_that_comes_up_meanwhile_is_kept(diffcache, tiny_demo, tmp_path, monkeypatch):
    from diffcache.cli import loading

    load = loading.load_pipeline

    def slow(*arguments, **settings):
        (tmp_path / "a-seed0.png").write_bytes(b"another run's")
        return load(*arguments, **settings)

    monkeypatch.setattr("diffcache.cli.loading.load_pipeline", slow)
    ran = diffcache("run", tiny_demo, "a", *SHORT, "--out", tmp_path, "--json")
    assert ran.json()["clips"][0]["path"] == str(tmp_path / "a-seed0-2.png")
    assert (tmp_path / "a-seed0.png").read_bytes() == b"another run's"


def test_the_page_shows_every_clip_and_asks_for_nothing(diffcache, tiny_demo, tmp_path):
    page = tmp_path / "pages" / "x.html"
    prompts = ("<b>a</b> & red", "b")
    ran = diffcache(
        "run", tiny_demo, *prompts, *SHORT, "--compare", "--out", tmp_path, "--report", page
    )
    assert ran.code == 0, ran.err
    text = page.read_text(encoding="utf-8")
    assert text.count("<video") == 2 and text.count("Computed and reused steps") == 2
    assert "&lt;b&gt;a&lt;/b&gt; &amp; red" in text and "<b>a</b>" not in text
    links = re.findall(r"""(?:src|href)=["']([^"']{0,40})""", text)
    assert links and all(link.startswith("data:") for link in links)
    assert "://" not in re.sub(r"data:[a-z0-9/]+;base64,[A-Za-z0-9+/=]+", "", text)


def test_what_is_finished_stays_when_a_later_clip_fails(diffcache, tiny_demo, tmp_path):
    from diffcache.cli import media

    write, calls = media.write_clip, []

    def second_fails(frames, path, fps, force):
        calls.append(path)
        if len(calls) == 2:
            raise OSError("the disk is full")
        return write(frames, path, fps, force)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffcache.cli.run_task.write_clip", second_fails)
        page = tmp_path / "x.html"
        ran = diffcache(
            "run", tiny_demo, "a", "b", "c", *SHORT, "--out", tmp_path, "--report", page
        )
    assert ran.code == 2 and ran.out == ""
    assert ran.err == (f"diffcache: the disk is full (1 of 3 clips are finished, in {tmp_path})\n")
    assert {path.name for path in tmp_path.iterdir()} == {"a-seed0.png", "x.html"}
    assert page.read_text(encoding="utf-8").count("Computed and reused steps") == 1


ERRORS = [
    ((), "no prompt: write one after SOURCE"),
    ((" ",), "prompt 1 is empty"),
    (("a", "--prompts", "none.txt"), "none.txt cannot be read: no such file"),
    (("a", "--seeds", "x"), "--seeds must be like 7 or 0,1,5 or 0-3"),
    (("a", "--set", "fraction"), "--set takes name=value"),
    (("a", "--set", "fractoin=1"), "did you mean 'fraction'"),
    (("a", "--set", "fraction=2"), "fraction must be in"),
    (("a", "--policy", "balnced"), "did you mean 'balanced'"),
    (("a", "--policy", "none.json"), "none.json"),
    (("a", "--scheduler", "oiler"), "did you mean 'euler'"),
    (("a", "--report", "page.txt"), "must end in .html"),
    (("a", "--out", "x.webm"), "choose one of mp4, gif, png"),
    (("a", "--format", "avi"), "choose one of mp4, gif, png"),
    (("a", "--dtype", "int8"), "dtype must be one of"),
    (("a", "--device", "toaster"), "cannot be used here"),
    (("a", "--height", "0"), "diffcache run --help"),
    (("a", "--guidance", "nan"), "--guidance must be a finite number"),
    (("a", "--height", "33"), "WanPipeline refuses: `height` and `width` have to be divisible"),
]


@pytest.mark.parametrize(("arguments", "says"), ERRORS)
def test_errors_are_one_line_and_leave_no_file(
    arguments, says, diffcache, tiny_demo, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    ran = diffcache("run", tiny_demo, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("diffcache: ") and ran.err.count("\n") == 1
    assert says in ran.err
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_source_that_is_none(diffcache, tmp_path):
    ran = diffcache("run", tmp_path, "a", "--out", tmp_path / "x")
    assert ran.code == 2 and "holds no model_index.json" in ran.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried 1 TB"),
        MemoryError(),
    ],
)
def test_memory_that_runs_out_says_what_to_do(error, diffcache, tiny_demo, tmp_path, monkeypatch):
    from diffusers import WanPipeline

    def full(*_, **__):
        raise error

    monkeypatch.setattr(WanPipeline, "encode_prompt", full)
    ran = diffcache("run", tiny_demo, "a", "--out", tmp_path)
    assert ran.code == 2 and "out of memory: ask for fewer --frames" in ran.err


def test_a_clip_that_is_broken_says_so(diffcache, tiny_demo, tmp_path, monkeypatch):
    from diffusers import AutoencoderKLWan

    decode = AutoencoderKLWan._decode

    def broken(self, *arguments, **settings):
        found = decode(self, *arguments, **settings)
        found.sample[..., 0, 0] = float("nan")
        return found

    monkeypatch.setattr(AutoencoderKLWan, "_decode", broken)
    ran = diffcache("run", tiny_demo, "a", *SHORT, "--out", tmp_path, "--compare", "--json")
    assert ran.code == 0, ran.err
    clip = ran.json()["clips"][0]
    assert any("NaN or infinity" in note for note in clip["notes"])
    assert clip["psnr"] is None and not clip["identical"]

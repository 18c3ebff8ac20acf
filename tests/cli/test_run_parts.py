"""What `diffcache run` is asked for: prompts, seeds, settings, file names, arguments."""

import inspect
import os

import numpy as np
import pytest

from diffcache.cli.run_call import Call, Options
from diffcache.cli.run_clip import as_bytes, frames_of
from diffcache.cli.run_files import LONGEST, Place, make_folder, plan, refuse_existing, safe_name
from diffcache.cli.run_input import read_prompts, read_seeds, read_settings


class TextToVideo:
    def __call__(
        self,
        prompt,
        negative_prompt=None,
        height=480,
        num_frames=81,
        num_inference_steps=50,
        guidance_scale=5.0,
        frame_rate=25,
        generator=None,
        output_type="pil",
        callback_on_step_end=None,
    ): ...


class TextToImage:
    def __call__(self, prompt, height=None, width=None, generator=None, **ignored): ...


class ImageToVideo:
    def __call__(self, image, prompt, num_frames=81, generator=None): ...


class Unprompted:
    def __call__(self, batch_size=1, generator=None): ...


def test_prompts_come_from_arguments_and_then_from_the_file(tmp_path):
    file = tmp_path / "prömpts 1.txt"
    file.write_bytes("\ufeffein Kreis\r\n\r\n   \n  红色圆圈 🎈  \rlast\u2028one".encode())
    assert read_prompts(["first"], file) == ["first", "ein Kreis", "红色圆圈 🎈", "last\u2028one"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no prompt"),
        (b"\xef\xbb\xbf\n \n", "holds no prompt"),
        ("rot".encode("utf-16"), "not UTF-8 text"),
        (None, "cannot be read: no such file"),
    ],
)
def test_a_file_without_prompts_is_an_error(content, says, tmp_path):
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=says):
        read_prompts(["one"], file)


def test_a_folder_is_no_prompts_file(tmp_path):
    with pytest.raises(ValueError, match="cannot be read: is a directory"):
        read_prompts([], tmp_path)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [([], "no prompt"), (["a", " \t"], "prompt 2 is empty"), ([os.fsdecode(b"\xff")], "not UTF-8")],
)
def test_prompts_that_are_none(arguments, says):
    with pytest.raises(ValueError, match=says):
        read_prompts(arguments, None)


def test_seeds_are_numbers_and_ranges():
    assert read_seeds("7") == [7]
    assert read_seeds("0-2, 7,5-5") == [0, 1, 2, 7, 5]
    assert read_seeds(str(2**63 - 1)) == [2**63 - 1]


@pytest.mark.parametrize("text", ["", "x", "1,", "-1", "3-1", "1-", "1.5", "0-99999999", "1,0-2"])
def test_other_seeds_are_refused(text):
    with pytest.raises(ValueError, match="--seeds"):
        read_seeds(text)
    with pytest.raises(ValueError, match=r"2\*\*63"):
        read_seeds(str(2**63))


def test_settings_are_json_or_text():
    pairs = ["fraction=0.5", "n=3", "max_bytes=None", "x=true", "site=model", "t=1e-3", "l=[1, 2]"]
    assert read_settings([*pairs, "a=b=c"]) == {
        "fraction": 0.5,
        "n": 3,
        "max_bytes": None,
        "x": True,
        "site": "model",
        "t": 1e-3,
        "l": [1, 2],
        "a": "b=c",
    }


@pytest.mark.parametrize("pairs", [["fraction"], ["=1"], ["a=1", "a=2"]])
def test_other_settings_are_refused(pairs):
    with pytest.raises(ValueError, match="--set"):
        read_settings(pairs)


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("a red circle, moving left", "a-red-circle-moving-left"),
        ("Ein «schönes» Bild: ÄÖÜ", "Ein-schönes-Bild-ÄÖÜ"),
        ("红色圆圈 → 左 🎈", "红色圆圈-→-左-🎈"),
        ("हिन्दी में", "हिन्दी-में"),
        ("../../etc/passwd", "etc-passwd"),
        ("a\x00b\nc\td\u202e", "a-b-c-d"),
        ("-rf *", "rf"),
        ("<>:\"/\\|?*'`$&;", "clip"),
        ("e\u0301", "\u00e9"),
    ],
)
def test_names_keep_letters_of_any_script_and_nothing_dangerous(prompt, name):
    assert safe_name(prompt) == name


@pytest.mark.parametrize("letter", ["a", "ü", "圆", "🎈"])
def test_long_prompts_are_cut_between_letters(letter, tmp_path):
    name = safe_name(letter * 500)
    assert set(name) == {letter}
    assert LONGEST - 4 < len(name.encode()) <= LONGEST
    (tmp_path / f"{name}-seed{2**63}-uncached-100.mp4").touch()


def names(place, prompts, seeds=(0,), compare=False):
    return [job.path.name for job in plan(place, prompts, seeds, compare)]


def test_equal_names_get_a_number(tmp_path):
    place = Place.choose(tmp_path, None, video=True)
    assert names(place, ["a b", "a, b", "A B"]) == [
        "a-b-seed0.mp4",
        "a-b-seed0-2.mp4",
        "A-B-seed0-3.mp4",
    ]
    assert names(place, ["a"], [3, 1]) == ["a-seed3.mp4", "a-seed1.mp4"]
    one = Place.choose(tmp_path / "x.gif", None, video=True)
    assert names(one, ["a", "b"], [0, 1]) == ["x.gif", "x-2.gif", "x-3.gif", "x-4.gif"]


def test_uncached_clips_have_names_of_their_own(tmp_path):
    place = Place.choose(tmp_path / "x.gif", None, video=True)
    jobs = plan(place, ["a", "b"], [0], True)
    paths = [path for job in jobs for path in (job.path, job.reference)]
    assert [p.name for p in paths] == [
        "x.gif",
        "x-uncached.gif",
        "x-2.gif",
        "x-2-uncached.gif",
    ]
    assert [job.reference for job in plan(place, ["a"], [0], False)] == [None]


@pytest.mark.parametrize(
    ("out", "kind", "video", "suffix"),
    [
        ("folder", None, True, ".mp4"),
        ("folder", None, False, ".png"),
        ("folder", "gif", True, ".gif"),
        ("v1.5", None, True, ".mp4"),
        ("x.PNG", None, True, ".PNG"),
        ("x.png", "png", False, ".png"),
    ],
)
def test_the_format_follows_from_name_option_and_pipeline(out, kind, video, suffix, tmp_path):
    place = Place.choose(tmp_path / out, kind, video)
    assert place.suffix == suffix
    assert place.folder == (tmp_path if out[0] == "x" else tmp_path / out)


@pytest.mark.parametrize(
    ("out", "kind", "video", "says"),
    [
        ("x.webm", None, True, "webm is not written: choose one of mp4, gif, png"),
        ("folder", "avi", True, "avi is not written"),
        ("x.mp4", "gif", True, "differ"),
        ("x.mp4", None, False, "makes images"),
        ("folder", "gif", False, "makes images"),
    ],
)
def test_formats_that_cannot_be(out, kind, video, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        Place.choose(tmp_path / out, kind, video)


def test_a_folder_named_like_a_file_is_a_folder(tmp_path):
    (tmp_path / "x.mp4").mkdir()
    assert Place.choose(tmp_path / "x.mp4", None, video=True).folder == tmp_path / "x.mp4"


def test_mp4_needs_its_library(tmp_path, monkeypatch):
    monkeypatch.setattr("diffcache.cli.run_files.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install imageio-ffmpeg"):
        Place.choose(tmp_path, None, video=True)
    assert Place.choose(tmp_path, "gif", video=True).suffix == ".gif"


def test_existing_files_are_refused_and_folders_even_with_force(tmp_path):
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    paths = [tmp_path / "new", tmp_path / "a", tmp_path / "b"]
    with pytest.raises(ValueError, match="a and 1 more is there already: give --force"):
        refuse_existing(paths, force=False)
    refuse_existing(paths, force=True)
    with pytest.raises(ValueError, match="is a folder"):
        refuse_existing([tmp_path], force=True)


def test_a_folder_that_cannot_be_made_or_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write in .*: choose another --out"):
        make_folder(tmp_path / "file" / "below")
    make_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    if os.geteuid():
        (tmp_path / "a").chmod(0o500)
        with pytest.raises(ValueError, match=r"cannot write in .*permission"):
            make_folder(tmp_path / "a")


def test_arguments_have_the_names_of_the_pipeline():
    asked = Options(steps=9, guidance=0.0, height=64, frames=5, fps=12.5, negative="")
    call = Call.plan(TextToVideo, asked, None)
    assert call.arguments == {
        "num_inference_steps": 9,
        "guidance_scale": 0.0,
        "height": 64,
        "num_frames": 5,
        "frame_rate": 12.5,
        "negative_prompt": "",
        "output_type": "np",
    }
    assert (call.fps, call.video) == (12.5, True)


def test_nothing_is_passed_that_was_not_asked_for():
    call = Call.plan(TextToVideo, Options(), None)
    assert call.arguments == {"output_type": "np"}
    assert call.fps == 25
    image = Call.plan(TextToImage, Options(fps=3), None)
    assert image.arguments == {} and not image.video


def test_a_demo_folder_brings_defaults_that_options_replace(tiny_demo):
    from diffusers import WanPipeline

    call = Call.plan(WanPipeline, Options(height=48), tiny_demo)
    assert call.arguments == {
        "guidance_scale": 3.0,
        "height": 48,
        "width": 32,
        "num_frames": 5,
        "num_inference_steps": 12,
        "max_sequence_length": 16,
        "output_type": "np",
    }
    assert call.fps == 8


@pytest.mark.parametrize(
    ("pipeline", "options", "says"),
    [
        (TextToVideo, {"width": 64}, "TextToVideo takes no --width: leave it out"),
        (TextToImage, {"frames": 5, "steps": 3}, "takes no --steps, --frames"),
        (ImageToVideo, {}, "ImageToVideo needs image"),
        (Unprompted, {}, "takes no prompt"),
    ],
)
def test_what_a_pipeline_does_not_take_is_an_error(pipeline, options, says):
    with pytest.raises(ValueError, match=says):
        Call.plan(pipeline, Options(**options), None)


def test_guidance_is_finite():
    with pytest.raises(ValueError, match="--guidance must be a finite number, got nan"):
        Options(guidance=float("nan"))


def test_signatures_of_diffusers_are_understood():
    """Decorated calls keep their parameters, and each kind is told apart by them."""
    import diffusers

    for name, video in (("WanPipeline", True), ("LTXPipeline", True), ("FluxPipeline", False)):
        cls = getattr(diffusers, name)
        call = Call.plan(cls, Options(steps=3, height=64, negative="blur"), None)
        assert call.video is video
        assert set(call.arguments) <= set(inspect.signature(cls.__call__).parameters)
        assert {"callback_on_step_end", "generator"} <= call.takes


class Output:
    def __init__(self, **found):
        self.__dict__.update(found)


def test_frames_of_what_pipelines_return():
    from PIL import Image

    video = np.random.default_rng(0).random((1, 5, 8, 6, 3)).astype(np.float32)
    assert (frames_of(Output(frames=video)) == video[0]).all()
    pictures = [Image.fromarray((frame * 255).astype(np.uint8)) for frame in video[0]]
    assert frames_of(Output(frames=[pictures])).shape == (5, 8, 6, 3)
    assert frames_of(Output(images=pictures[:1])).shape == (1, 8, 6, 3)
    assert frames_of(Output(images=video[0][:1])).shape == (1, 8, 6, 3)
    assert frames_of(Output(images=[p.convert("L") for p in pictures[:1]])).shape == (1, 8, 6, 3)
    assert frames_of(Output(images=[p.convert("RGBA") for p in pictures[:1]])).shape == (1, 8, 6, 3)


@pytest.mark.parametrize("found", [{}, {"frames": []}, {"frames": np.zeros((1, 2, 3, 8, 8))}])
def test_what_is_no_clip_says_so(found):
    with pytest.raises(ValueError, match=r"neither frames nor images|cannot be written"):
        frames_of(Output(**found))


def test_bytes_of_frames():
    frames = np.array([0.0, 0.5, 1.0, 1.2, -3.0, np.nan, np.inf], np.float32)
    assert as_bytes(frames).tolist() == [0, 128, 255, 255, 0, 0, 0]
    same = np.array([7], np.uint8)
    assert as_bytes(same) is same

"""Clips on disk: what was written is what was given, and nothing half-written is left."""

import errno
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diffcache.cli.media import numbered, publish, sheet, write_clip
from diffcache.metrics import psnr

FRAMES = 7


@pytest.fixture
def clip():
    """uint8 [7, 33, 46, 3]: smooth colours with a square that moves."""
    ramp = np.linspace(0, 180, 46)[None, :, None] * np.array([1.0, 0.5, 0.2])
    frames = np.broadcast_to(ramp, (FRAMES, 33, 46, 3)).astype(np.uint8).copy()
    for index in range(FRAMES):
        frames[index, 10:20, 4 * index : 4 * index + 10] = (220, 40, 30)
    return frames


def read_mp4(path: Path) -> tuple[np.ndarray, dict]:
    import imageio_ffmpeg

    reader = imageio_ffmpeg.read_frames(str(path))
    about = next(reader)
    width, height = about["size"]
    frames = [np.frombuffer(f, np.uint8).reshape(height, width, 3) for f in reader]
    return np.stack(frames), about


def test_mp4_holds_every_frame_and_odd_sides_grow_to_even(clip, tmp_path):
    path = write_clip(clip, tmp_path / "clip.mp4", fps=5)
    frames, about = read_mp4(path)
    assert frames.shape == (FRAMES, 34, 46, 3)
    assert about["fps"] == 5
    assert psnr(frames[:, :33], clip) > 30
    assert [p.name for p in tmp_path.iterdir()] == ["clip.mp4"]


def test_colours_of_large_and_small_mp4_are_those_of_the_frames(tmp_path):
    """Players take BT.709 for large videos: untagged files would look different there."""
    colours = np.zeros((2, 64, 64, 3), np.uint8)
    colours[:] = (200, 30, 90)
    frames, about = read_mp4(write_clip(colours, tmp_path / "c.mp4", fps=8))
    assert "bt709" in about["pix_fmt"]
    assert np.abs(frames.astype(int) - colours).max() <= 8


def test_gif_holds_every_frame_at_its_rate(clip, tmp_path):
    image = Image.open(write_clip(clip, tmp_path / "clip.gif", fps=10))
    assert image.n_frames == FRAMES
    assert image.info["duration"] == 100 and image.info["loop"] == 0
    for index in range(FRAMES):
        image.seek(index)
        shown = np.array(image.convert("RGB"))
        assert psnr(shown[None], clip[index][None]) > 25


def test_png_is_the_image_or_a_sheet_of_all_frames(clip, tmp_path):
    one = Image.open(write_clip(clip[:1], tmp_path / "one.png", fps=8))
    assert (np.asarray(one) == clip[0]).all()
    page = np.asarray(Image.open(write_clip(clip, tmp_path / "all.PNG", fps=8)))
    assert page.shape == (3 * 33, 3 * 46, 3)
    assert (page[:33, 46:92] == clip[1]).all()
    assert (page[33:66, :46] == clip[3]).all()
    assert (page[66:, 46:] == 0).all()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 17, 81])
def test_a_sheet_is_about_square_and_wastes_no_row(count):
    grid = sheet(np.ones((count, 1, 1, 3), np.uint8))
    rows, columns = grid.shape[:2]
    assert rows <= columns <= rows + 2
    assert (rows - 1) * columns < count <= rows * columns


def test_an_existing_file_is_kept_unless_forced(clip, tmp_path):
    path = tmp_path / "clip.png"
    path.write_bytes(b"mine")
    (tmp_path / "clip-2.png").write_bytes(b"mine too")
    assert write_clip(clip, path, fps=8) == tmp_path / "clip-3.png"
    assert path.read_bytes() == b"mine"
    assert write_clip(clip, path, fps=8, force=True) == path
    assert Image.open(path).size == (3 * 46, 3 * 33)
    assert len(list(tmp_path.iterdir())) == 3


def test_it_is_kept_on_a_file_system_without_links_too(clip, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr("diffcache.cli.media.os.link", refuse)
    path = tmp_path / "clip.png"
    path.write_bytes(b"mine")
    assert write_clip(clip, path, fps=8) == tmp_path / "clip-2.png"
    assert path.read_bytes() == b"mine"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError])
def test_nothing_is_left_of_a_write_that_did_not_end(failure, tmp_path):
    def half(draft: Path) -> None:
        draft.write_bytes(b"half")
        raise failure

    with pytest.raises(failure):
        publish(tmp_path / "clip.mp4", half)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["mp4", "gif", "png"])
def test_a_folder_that_is_gone_is_named(kind, clip, tmp_path):
    with pytest.raises(OSError, match="was not written") as failed:
        write_clip(clip, tmp_path / "gone" / f"clip.{kind}", fps=8)
    assert "diffcache-" not in str(failed.value)


def test_numbers_come_before_the_suffix():
    assert numbered(Path("a/b.c.mp4"), 1) == Path("a/b.c.mp4")
    assert numbered(Path("a/b.c.mp4"), 12) == Path("a/b.c-12.mp4")

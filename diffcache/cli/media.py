"""Writes a clip as mp4, gif or png: first under another name, so no half-written file is left."""

import errno
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FORMATS = ("mp4", "gif", "png")
_TOO_LARGE = [-signal.SIGXFSZ] if hasattr(signal, "SIGXFSZ") else []  # not on Windows
CRF = 16  # H.264 quality; 16 is hard to tell from the frames themselves

Array = np.ndarray[Any, Any]


def write_clip(frames: Array, path: Path, fps: float, force: bool = False) -> Path:
    """Writes uint8 frames [F, H, W, 3] in the format of the path's suffix.

    A png is the frame itself, or a sheet of all frames in rows, read as a page is. A file that is
    there already, or came up meanwhile, is kept without `force`: "clip.mp4" becomes "clip-2.mp4".

    Returns:
        The path written.

    Raises:
        OSError: the disk is full or the folder cannot be written; nothing is left behind.
    """
    encode = {".mp4": write_mp4, ".gif": _write_gif, ".png": _write_png}[path.suffix.lower()]
    return publish(path, lambda draft: encode(frames, draft, fps), force)


def publish(path: Path, write: Callable[[Path], None], force: bool = False) -> Path:
    """Lets `write` fill a file beside `path`, then gives it its name; see `write_clip`."""
    draft = path.with_name(f".diffcache-{os.getpid()}-{os.urandom(4).hex()}{path.suffix.lower()}")
    try:
        write(draft)
        with draft.open("rb+") as written:
            os.fsync(written.fileno())  # some disks tell only here that they are full
        if force:
            return draft.replace(path)
        return _name_without_overwriting(draft, path)
    except OSError as error:
        raise _explained(error, draft, path) from error
    finally:
        draft.unlink(missing_ok=True)


def numbered(path: Path, number: int) -> Path:
    """ "clip.mp4" for 1, "clip-2.mp4" for 2."""
    return path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")


def write_mp4(frames: Array, path: Path, fps: float, *, seekable: bool = False) -> None:
    """H.264 in colours of BT.709; odd sides grow by one pixel, as the format needs even ones.

    Args:
        seekable: every frame is a key frame, so that a page can step through them.

    Raises:
        ImportError: without imageio-ffmpeg.
        OSError: ffmpeg failed; the message is its own.
    """
    even = _even(frames)
    height, width = even.shape[1:3]
    command = [_ffmpeg(), "-y", "-loglevel", "error", "-f", "rawvideo", "-pix_fmt", "rgb24"]
    command += ["-s", f"{width}x{height}", "-r", f"{fps:g}", "-i", "-"]
    colours = "scale=out_color_matrix=bt709:out_range=tv,"
    colours += "setparams=colorspace=bt709:color_primaries=bt709:color_trc=bt709"
    command += ["-vf", colours, "-pix_fmt", "yuv420p"]
    command += ["-c:v", "libx264", "-crf", str(CRF), "-movflags", "+faststart"]
    command += ["-g", "1"] if seekable else []
    # A session of its own: Ctrl-C reaches us, and we end it.
    done = subprocess.run(
        [*command, str(path)], input=even.tobytes(), capture_output=True, start_new_session=True
    )
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split()[-40:])
        code = _error_code(done.returncode, said)
        raise OSError(code, said or f"ffmpeg ended with status {done.returncode}")


def sheet(frames: Array) -> Array:
    """uint8 [rows*H, columns*W, 3]: all frames in rows, on black where the last row ends early."""
    count = len(frames)
    columns = 1
    while columns * -(-count // columns) < count or columns < -(-count // columns):
        columns += 1
    rows = -(-count // columns)
    blank = np.zeros((rows * columns - count, *frames.shape[1:]), np.uint8)
    grid = np.concatenate([frames, blank]).reshape(rows, columns, *frames.shape[1:])
    height, width, channels = frames.shape[1:]
    return grid.swapaxes(1, 2).reshape(rows * height, columns * width, channels)


def _write_gif(frames: Array, path: Path, fps: float) -> None:
    """One palette for all frames, so that still parts do not flicker."""
    from PIL import Image

    # Every pixel of a few frames is enough to choose 256 colours from.
    chosen = frames[:: max(1, len(frames) // 8)]
    colours = Image.fromarray(chosen.reshape(-1, *frames.shape[2:])).quantize(256)
    images = [Image.fromarray(frame).quantize(palette=colours) for frame in frames]
    duration = max(20, 10 * round(100 / fps))  # gif counts hundredths of a second; viewers want 2
    images[0].save(
        path, save_all=True, append_images=images[1:], duration=duration, loop=0, optimize=False
    )


def _write_png(frames: Array, path: Path, fps: float) -> None:
    from PIL import Image

    Image.fromarray(frames[0] if len(frames) == 1 else sheet(frames)).save(path)


def _ffmpeg() -> str:
    try:
        from imageio_ffmpeg import get_ffmpeg_exe
    except ImportError as error:
        raise ImportError(
            "mp4 needs imageio-ffmpeg: pip install imageio-ffmpeg, or choose gif"
        ) from error
    return get_ffmpeg_exe()


def _error_code(status: int, said: str) -> int:
    """What stopped ffmpeg; a bound on the size of files kills it without a word."""
    if status in _TOO_LARGE or "File too large" in said:
        return errno.EFBIG
    return errno.ENOSPC if "No space left" in said else errno.EIO


def _even(frames: Array) -> Array:
    height, width = frames.shape[1:3]
    return np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def _name_without_overwriting(draft: Path, path: Path) -> Path:
    for number in range(1, 10_000):
        free = numbered(path, number)
        try:
            os.link(draft, free)  # fails where the name is taken, in one step
            return free
        except FileExistsError:
            continue
        except OSError:  # a file system without links
            if not free.exists():
                return draft.rename(free)
    raise FileExistsError(errno.EEXIST, "too many files of this name: choose another folder")


def _explained(error: OSError, draft: Path, path: Path) -> OSError:
    """The same with the remedy, and the final name instead of the draft's."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OSError(f"the disk is full, {path} was not written: free space, or write elsewhere")
    if error.errno == errno.EFBIG:
        return OSError(f"{path} is larger than a file may be here: raise `ulimit -f`")
    why = (error.strerror or str(error)).replace(str(draft), path.name)
    return OSError(f"{path} was not written ({why}): write elsewhere")

"""Which files `diffcache run` will write: named before any work, and none of them overwritten."""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import count, product
from os import urandom
from pathlib import Path

from .media import FORMATS, numbered

OTHERS = ("avi", "jpeg", "jpg", "mkv", "mov", "webm", "webp")
LONGEST = 80  # bytes of a prompt in a file name; names may hold 255
UNCACHED = "-uncached"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One clip to make, where it goes, and where the uncached one for comparison goes."""

    prompt: str
    seed: int
    path: Path
    reference: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where clips go: a folder, or one file (`name` is then its name); the suffix has its dot."""

    folder: Path
    name: str
    suffix: str

    @classmethod
    def choose(cls, out: Path, kind: str | None, video: bool) -> "Place":
        """From --out, --format and what the pipeline makes.

        Raises:
            ValueError: a format that is not written, that differs from the file's, or that does
                not suit an image; mp4 without imageio-ffmpeg.
        """
        ending = "" if out.is_dir() else out.suffix.lower().lstrip(".")
        if ending in OTHERS or (kind is not None and kind not in FORMATS):
            wrong = ending if ending in OTHERS else kind
            raise ValueError(f"{wrong} is not written: choose one of {', '.join(FORMATS)}")
        file = ending in FORMATS
        if file and kind not in (None, ending):
            raise ValueError(f"--format {kind} and --out {out} differ: drop one of them")
        chosen = ending if file else kind or ("mp4" if video else "png")
        if not video and chosen != "png":
            raise ValueError(f"this pipeline makes images, not {chosen}: use --format png")
        if chosen == "mp4" and find_spec("imageio_ffmpeg") is None:
            raise ValueError("mp4 needs imageio-ffmpeg: pip install imageio-ffmpeg, or use gif")
        if file:
            return cls(folder=out.parent, name=out.stem, suffix=out.suffix)
        return cls(folder=out, name="", suffix=f".{chosen}")


def plan(place: Place, prompts: Sequence[str], seeds: Sequence[int], compare: bool) -> list[Job]:
    """Every prompt with every seed; names that would be equal, in any letter case, get a number."""
    taken: set[str] = set()
    jobs = []
    for prompt, seed in product(prompts, seeds):
        stem = place.name or f"{safe_name(prompt)}-seed{seed}"
        path, reference = _free(place.folder / f"{stem}{place.suffix}", taken)
        jobs.append(
            Job(prompt=prompt, seed=seed, path=path, reference=reference if compare else None)
        )
    return jobs


def safe_name(prompt: str) -> str:
    """A file name's start: letters, digits and signs of any script kept, all else a hyphen."""
    kept = [c if _is_plain(c) else " " for c in unicodedata.normalize("NFC", prompt)]
    words = "-".join("".join(kept).split())
    short = words.encode()[:LONGEST].decode(errors="ignore").rstrip("-")
    return short or "clip"


def refuse_existing(paths: Iterable[Path], force: bool) -> None:
    """Raises ValueError if one of the files is there already; a folder even with `force`."""
    found = [path for path in paths if path.is_dir() or (path.exists() and not force)]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        if found[0].is_dir():
            raise ValueError(f"{found[0]} is a folder: choose another name")
        raise ValueError(
            f"{found[0]}{more} is there already: give --force to overwrite, or another --out"
        )


def make_folder(folder: Path) -> None:
    """Makes a folder and tries to write in it.

    Raises:
        ValueError: that cannot be done.
    """
    trial = folder / f".diffcache-{urandom(4).hex()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise ValueError(f"cannot write in {folder} ({why}): choose another --out") from error


def _free(path: Path, taken: set[str]) -> tuple[Path, Path]:
    """The first numbered path whose name, and that of its uncached twin, is not taken yet."""
    for number in count(1):
        free = numbered(path, number)
        pair = free, free.with_name(f"{free.stem}{UNCACHED}{free.suffix}")
        names = {unicodedata.normalize("NFC", p.name).casefold() for p in pair}
        if not names & taken:
            taken |= names
            return pair
    raise AssertionError("count ended")


def _is_plain(character: str) -> bool:
    """Letters, marks, digits, and signs such as emoji; no punctuation, spaces or controls."""
    return (
        character == "_"
        or unicodedata.category(character)[0] in "LMN"
        or (ord(character) > 127 and unicodedata.category(character)[0] == "S")
    )

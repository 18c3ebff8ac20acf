"""One session of a pool: its bytes, its frames, its place in line."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import TIMEOUT_MAX, Lock
from typing import TYPE_CHECKING
from weakref import WeakMethod, finalize

from ..errors import DiffcacheError

if TYPE_CHECKING:
    from .admission import Admission

MARKS = 32  # frame reports over which growth is measured


class AdmissionRefused(DiffcacheError):
    """There is no room: the message is one line that says what would help."""


class Place:
    """What the pool knows of a session; it never holds the session itself.

    Attributes:
        nbytes: what the session asks for while it waits, and holds while it runs.
        frames: how many frames it has reported.
        state: "waiting", "running" or "ended".
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.frames, self.state = nbytes, 0, "waiting"
        self._marks: deque[tuple[float, int]] = deque(maxlen=MARKS)
        # A bare lock for a signal: an Event's own lock could be held by whom the collector stops.
        self.turn = Lock()
        self.turn.acquire()

    def begin(self, now: float) -> None:
        self.state = "running"
        self._marks.append((now, self.nbytes))
        self.turn.release()

    def leave(self) -> None:
        if self.state == "waiting":
            self.turn.release()
        self.state = "ended"

    def mark(self, now: float, count: int) -> None:
        """Takes in `count` frames more, after which the session holds what it holds now."""
        self.frames += count
        if self._marks[-1][1] == self._marks[0][1] == self.nbytes:
            self._marks.clear()  # it has not begun to grow: what came before says nothing
        self._marks.append((now, self.nbytes))

    def growth(self, now: float) -> float:
        """Bytes per second: frames/s times bytes/frame over the last marks, until now."""
        since, before = self._marks[0]
        return (self.nbytes - before) / (now - since) if now > since else 0.0

    def check_running(self) -> None:
        if self.state != "running":
            raise AdmissionRefused(f"this session is {self.state}, not running: admit one first")


class Session:
    """A session's place in a pool, from `Admission.admit` or `request`; a context manager."""

    def __init__(
        self, pool: Admission, place: Place, left: deque[Place], sweep: Callable[[], None]
    ) -> None:
        self._pool, self._place = pool, place
        # Holds the pool weakly, and only appends: whatever thread the collector runs in.
        self._collected = finalize(self, _collected, place, left, WeakMethod(sweep))
        self._collected.atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes that it asks for while it waits, and holds while it runs."""
        return self._place.nbytes

    @property
    def frames(self) -> int:
        """How many frames it has reported."""
        return self._place.frames

    @property
    def state(self) -> str:
        """ "waiting", "running" or "ended"."""
        return self._place.state

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for its turn, `timeout` seconds at most; whether it runs now."""
        most = -1 if timeout is None else min(max(0.0, timeout), TIMEOUT_MAX)
        if self._place.turn.acquire(timeout=most):
            self._place.turn.release()
        return self.state == "running"

    def hold(self, nbytes: int) -> None:
        """Says what the session holds, all in all; call it before allocating more.

        Raises:
            AdmissionRefused: the pool has not so much; the session's bytes stay what they were.
        """
        self._pool._hold(self._place, nbytes)

    def frame(self, seconds: float, count: int = 1) -> None:
        """Says that a chunk of `count` frames took so many seconds; call it after `hold`."""
        self._pool._frame(self._place, seconds, count)

    def end(self) -> None:
        """Gives the bytes back, or leaves the line; a second time does nothing."""
        self._pool._end(self._place)
        self._collected.detach()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()


def _collected(place: Place, left: deque[Place], sweep: WeakMethod[Callable[[], None]]) -> None:
    left.append(place)
    see_to = sweep()
    if see_to is not None:
        see_to()

"""Sessions that share a pool of bytes: admitted, made to wait, or refused before it runs out.

What grows: a `RollingCache` allocates all of its slots when it is made, so a session of one holds
`settings.nbytes()` from its first frame to its last, `settings.host_nbytes()` of them in the host's
memory, and admission alone keeps the pool whole. (A CPU's system hands memory out as it is first
written; here it counts from the start.) A session that also keeps snapshots, latents or an
unbounded cache grows; it says so by `hold`, and `exhaustion` predicts when the pool will be full.

Source: Metronome, arXiv 2607.02640. Differs: those above the number wait in line.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from .concurrency import AdmissionSettings, Concurrency, check_count
from .session import AdmissionRefused, Place, Session


class Admission:
    """A pool of bytes and the line in front of it, for the threads of one process.

    First come, first served: nobody overtakes, however small, so nobody waits for ever while
    sessions end. A session that was let go of without `end` gives its bytes back when it is
    collected.

    Args:
        pool_bytes: the bytes that all sessions share, on the device or wherever they count.
        clock: seconds that only ever grow.
        settings: the other fields of `AdmissionSettings`.

    Raises:
        ValueError: settings out of range.
    """

    def __init__(
        self, pool_bytes: int, *, clock: Callable[[], float] = time.monotonic, **settings: Any
    ) -> None:
        self.settings = AdmissionSettings(pool_bytes=pool_bytes, **settings)
        self._clock = clock
        self._concurrency = Concurrency(self.settings)
        self._running: list[Place] = []
        self._waiting: deque[Place] = deque()
        self._lock = Lock()
        # Of sessions that were collected: a finaliser may run anywhere, even under the lock.
        self._left: deque[Place] = deque()

    @property
    def used(self) -> int:
        """Bytes that the running sessions hold; never more than the pool."""
        with self._at_peace():
            return self._used()

    @property
    def running(self) -> int:
        """How many sessions run."""
        with self._at_peace():
            return len(self._running)

    @property
    def waiting(self) -> int:
        """How many wait in line."""
        with self._at_peace():
            return len(self._waiting)

    @property
    def limit(self) -> float:
        """How many may run at once, by their frame times; inf without a deadline."""
        with self._at_peace():
            return self._concurrency.limit

    def exhaustion(self) -> float:
        """Seconds until the pool is full if sessions go on as they do; inf if none grows.

        To first order (pool - used) / (sessions * frames/s * bytes/frame), with each session's own
        rate over its last `MARKS` frame reports. One that has not begun to grow counts as constant,
        so ask again once all of them do.
        """
        with self._at_peace():
            return self._time_left(0)

    def request(self, nbytes: int) -> Session:
        """A session of `nbytes` that runs at once or waits in line; `wait` for it, or `end` it.

        Raises:
            AdmissionRefused: more bytes than the pool has, or the line is full.
        """
        check_count("nbytes", nbytes, 0)
        if nbytes > self.settings.pool_bytes:
            raise AdmissionRefused(
                f"a session of {nbytes} bytes can never fit a pool of {self.settings.pool_bytes}: "
                "make its window or its batch smaller, or the pool larger"
            )
        place = Place(nbytes)
        session = Session(self, place, self._left, self._sweep)
        with self._at_peace():
            most = self.settings.max_waiting
            blocked = bool(self._waiting) or not self._fits(place)
            if blocked and most is not None and len(self._waiting) >= most:
                raise AdmissionRefused(f"{len(self._waiting)} sessions wait already: try later")
            self._waiting.append(place)
        return session

    def admit(self, nbytes: int, timeout: float | None = None) -> Session:
        """A session of `nbytes` that runs; waits in line for its turn, `timeout` seconds at most.

        Use it in a `with` block, which ends it:
        `with pool.admit(settings.nbytes()) as session: cache = RollingCache(...)`.

        Raises:
            AdmissionRefused: as `request`; or its turn did not come in time.
        """
        session = self.request(nbytes)
        try:
            granted = session.wait(timeout)
        except BaseException:
            session.end()
            raise
        if not granted:
            session.end()
            raise AdmissionRefused(f"no room for {nbytes} bytes within {timeout} s: try later")
        return session

    def _hold(self, place: Place, nbytes: int) -> None:
        check_count("nbytes", nbytes, 0)
        with self._at_peace():
            place.check_running()
            free = self.settings.pool_bytes - self._used()
            if nbytes - place.nbytes > free:
                raise AdmissionRefused(
                    f"{nbytes - place.nbytes} bytes more do not fit, {free} are free: "
                    "drop a snapshot, or end a session"
                )
            place.nbytes = nbytes

    def _frame(self, place: Place, seconds: float, count: int) -> None:
        check_count("count", count, 1)
        if not 0 <= seconds < math.inf:
            raise ValueError(f"seconds must be at least 0, got {seconds!r}")
        with self._at_peace():
            place.check_running()
            now = self._clock()
            place.mark(now, count)
            self._concurrency.frames(seconds / count, count, now, len(self._running))

    def _end(self, place: Place) -> None:
        with self._at_peace():
            self._remove(place)

    @contextmanager
    def _at_peace(self) -> Iterator[None]:
        """Under the lock, collected sessions gone; whoever fits now is let in afterwards."""
        try:
            with self._lock:
                self._forget()
                try:
                    yield
                finally:
                    self._serve()
        finally:
            self._sweep()

    def _sweep(self) -> None:
        """Sees to the collected sessions, unless somebody holds the lock and will on leaving."""
        while self._left and self._lock.acquire(blocking=False):
            try:
                self._forget()
                self._serve()
            finally:
                self._lock.release()

    def _forget(self) -> None:
        while self._left:
            self._remove(self._left.popleft())

    def _remove(self, place: Place) -> None:
        if place in self._running:
            self._running.remove(place)
        elif place in self._waiting:
            self._waiting.remove(place)
        place.leave()

    def _serve(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            place = self._waiting.popleft()
            self._running.append(place)
            place.begin(self._clock())

    def _fits(self, place: Place) -> bool:
        if not self._running:
            return True  # it is no larger than the pool
        if len(self._running) >= self._concurrency.limit:
            return False
        if self._used() + place.nbytes > self.settings.pool_bytes:
            return False
        return (
            not self.settings.horizon_s or self._time_left(place.nbytes) >= self.settings.horizon_s
        )

    def _used(self) -> int:
        return sum(place.nbytes for place in self._running)

    def _time_left(self, newcomer: int) -> float:
        """`exhaustion`, with a newcomer of so many bytes that grows as the others do on average."""
        now = self._clock()
        rate = sum(place.growth(now) for place in self._running)
        if newcomer and self._running:
            rate *= 1 + 1 / len(self._running)
        free = self.settings.pool_bytes - self._used() - newcomer
        return free / rate if rate > 0 else math.inf

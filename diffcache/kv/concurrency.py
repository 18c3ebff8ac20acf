"""How many sessions may run at once: one more while frames come in time, fewer when they do not.

Additive increase, multiplicative decrease, as in Metronome, arXiv 2607.02640, which does not
publish its numbers; those in `AdmissionSettings` are ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PERCENTILE = 0.95


@dataclass(frozen=True, kw_only=True)
class AdmissionSettings:
    """What a pool and its controller are told when they are made.

    Attributes:
        pool_bytes: the bytes that all sessions share.
        deadline_s: seconds that a frame may take; None leaves the number of sessions to the bytes.
        start: how many sessions may run at first, where there is a deadline.
        period_s: seconds over which frame times are judged together.
        clean_periods: periods in time, with all places taken, after which one more may run.
        decrease: factor on the number after a late period.
        headroom: a period is late if its 95th percentile exceeds this fraction of the deadline.
        horizon_s: a session waits while the pool would be full sooner than that with it.
        max_waiting: how many may wait in line before the next is refused; None for any number.

    Raises:
        ValueError: a number out of range.
    """

    pool_bytes: int
    deadline_s: float | None = None
    start: int = 1
    period_s: float = 1.0
    clean_periods: int = 3
    decrease: float = 0.7
    headroom: float = 0.8
    horizon_s: float = 0.0
    max_waiting: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("pool_bytes", 1), ("start", 1), ("clean_periods", 1)):
            check_count(name, getattr(self, name), least)
        if self.max_waiting is not None:
            check_count("max_waiting", self.max_waiting, 0)
        for name in ("deadline_s", "period_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be more than 0 seconds, got {value!r}")
        for name in ("decrease", "headroom"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} must be in (0, 1), got {getattr(self, name)!r}")
        if not 0 <= self.horizon_s < math.inf:
            raise ValueError(f"horizon_s must be at least 0 seconds, got {self.horizon_s!r}")


def check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")


def percentile(times: Sequence[float]) -> float:
    """The 95th percentile by nearest rank: a time that was seen, of one or more."""
    return sorted(times)[math.ceil(PERCENTILE * len(times)) - 1]


class Concurrency:
    """The number of sessions that may run, from the frame times that they report.

    A period counts as clean only while all places are taken: fewer sessions say nothing about one
    more. While more run than may (they are never sent away), a late period does not cut again.
    """

    def __init__(self, settings: AdmissionSettings) -> None:
        self.settings = settings
        self.limit: float = math.inf if settings.deadline_s is None else settings.start
        self._clean = 0
        self._since: float | None = None
        self._times: list[float] = []

    def frames(self, seconds: float, count: int, now: float, running: int) -> None:
        """Takes in `count` frames of so many seconds each; `running` sessions share the device."""
        if self.settings.deadline_s is None:
            return
        if self._since is None:
            self._since = now
        self._times += [seconds] * count
        if now - self._since >= self.settings.period_s:
            late = percentile(self._times) > self.settings.headroom * self.settings.deadline_s
            self._judge(late, running)
            self._since, self._times = now, []

    def _judge(self, late: bool, running: int) -> None:
        if late:
            self._clean = 0
            if running <= self.limit:
                self.limit = max(1, math.floor(self.limit * self.settings.decrease))
        elif running >= self.limit:
            self._clean += 1
            if self._clean == self.settings.clean_periods:
                self.limit, self._clean = self.limit + 1, 0

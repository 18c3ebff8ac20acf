"""Sessions that share a pool: the line, the bytes, what is predicted and what happens."""

from __future__ import annotations

import gc
import heapq
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from diffcache.kv import Admission, AdmissionRefused, RollingCache

Make = Callable[..., RollingCache]
FRAME = 2 * 2 * 3 * 2 * 4 * 4  # layers, K and V, tokens, heads, head_dim, fp32
WAIT = 20  # seconds; only ever reached by a defect


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_caches_fill_the_pool_and_the_next_waits_until_one_ends(make: Make) -> None:
    bytes_each = make(1, 3).settings.nbytes()
    pool = Admission(2 * bytes_each + 1)
    first, second = pool.admit(bytes_each), pool.admit(bytes_each)
    cache = make(1, 3)
    first.hold(cache.nbytes)
    third = pool.request(bytes_each)
    assert (pool.running, pool.waiting, third.state) == (2, 1, "waiting")
    assert pool.used == 2 * bytes_each and not third.wait(0)
    second.end()
    assert third.wait(0) and (pool.running, pool.waiting) == (2, 0)


def test_a_cache_without_snapshots_never_grows_so_nothing_is_predicted(
    make: Make, chunk: Any, clock: Clock
) -> None:
    cache = make(1, 3)
    pool = Admission(cache.nbytes, clock=clock)
    with pool.admit(cache.settings.nbytes()) as session:
        for _ in range(40):
            clock.now += 0.1
            for layer in range(2):
                cache.append(layer, *chunk(1))
            session.hold(cache.nbytes)
            session.frame(0.1)
            assert pool.exhaustion() == float("inf")
        assert session.frames == 40
    assert pool.used == 0


def grow(
    pool: Admission, clock: Clock, makers: list[tuple[RollingCache, float]], chunk: Any
) -> tuple[dict[int, float], float]:
    """Sessions that keep a snapshot of every chunk, until one is refused.

    Returns at which second the pool was predicted to be full, by the tenths of it in use then;
    and when it was.
    """
    rng, predicted = random.Random(0), dict[int, float]()
    sessions = [pool.admit(cache.settings.nbytes()) for cache, _ in makers]
    kept: list[Any] = []
    due = [(rng.random() * seconds, n) for n, (_, seconds) in enumerate(makers)]
    heapq.heapify(due)
    while True:
        clock.now, n = heapq.heappop(due)
        cache, seconds = makers[n]
        kept.append(cache.snapshot())
        wanted = cache.nbytes + cache.snapshot_growth(1)
        try:
            sessions[n].hold(wanted)
        except AdmissionRefused:
            return predicted, clock.now
        for layer in range(2):
            cache.append(layer, *chunk(1, cache.settings.batch_size))
        assert cache.nbytes == wanted
        sessions[n].frame(seconds)
        tenths = 10 * pool.used // pool.settings.pool_bytes
        if pool.exhaustion() < float("inf"):
            predicted.setdefault(tenths, clock.now + pool.exhaustion())
        heapq.heappush(due, (clock.now + seconds * rng.uniform(0.9, 1.1), n))


@pytest.mark.parametrize("different", [False, True], ids=["alike", "different"])
def test_the_predicted_exhaustion_is_within_5_percent(
    make: Make, chunk: Any, clock: Clock, different: bool
) -> None:
    makers = [
        (make(1, 2 + n * different, batch_size=1 + n % 2 * different), 0.1 + 0.07 * n * different)
        for n in range(4)
    ]
    start = sum(cache.nbytes for cache, _ in makers)
    pool = Admission(start + 400 * FRAME, clock=clock)
    predicted, actual = grow(pool, clock, makers, chunk)
    assert set(predicted) >= set(range(2, 10)), "asked from a fifth of the pool in use on"
    errors = {tenths: abs(at / actual - 1) for tenths, at in predicted.items() if tenths >= 2}
    assert max(errors.values()) <= 0.05, errors
    if not different:
        # By hand: 4 sessions, 10 frames/s, FRAME bytes per frame once the first 3 frames are in.
        assert actual == pytest.approx(0.3 + 400 * FRAME / (4 * 10 * FRAME), rel=0.05)


def test_a_session_waits_while_the_pool_would_be_full_too_soon(clock: Clock) -> None:
    pool = Admission(1000, clock=clock, horizon_s=10.0)
    first = pool.admit(100)
    for held in (150, 200, 250):
        clock.now += 1
        first.hold(held)
        first.frame(0.1)
    # 50 bytes/s now, 100 with two that grow alike: (1000 - 250 - 100) / 100 is under 10 s.
    second = pool.request(100)
    assert pool.exhaustion() == pytest.approx(15.0) and second.state == "waiting"
    clock.now += 7  # it grew no more: 150 bytes in 10 s, and 30 with the second: 650 / 30
    assert pool.exhaustion() == pytest.approx(50.0)
    assert second.state == "running"


def test_growth_beyond_the_pool_is_refused_and_changes_nothing() -> None:
    pool = Admission(100)
    one, two = pool.admit(40), pool.admit(40)
    one.hold(60)
    with pytest.raises(AdmissionRefused, match="21 bytes more do not fit, 0 are free"):
        two.hold(61)
    assert two.nbytes == 40 and pool.used == 100
    one.hold(10)
    two.hold(61)
    assert pool.used == 71


def test_what_can_never_fit_is_refused_in_one_line_even_from_an_empty_pool() -> None:
    pool = Admission(100)
    with pytest.raises(AdmissionRefused, match="101 bytes can never fit a pool of 100") as caught:
        pool.admit(101)
    assert "\n" not in str(caught.value) and pool.waiting == 0
    pool.admit(100)


def test_nobody_overtakes_however_small() -> None:
    pool = Admission(100)
    running = pool.admit(60)
    large, small = pool.request(80), pool.request(1)
    assert (large.state, small.state) == ("waiting", "waiting"), "1 byte would fit, 80 came first"
    running.end()
    assert (large.state, small.state) == ("running", "running")


def test_a_stream_of_small_sessions_does_not_starve_a_large_one() -> None:
    pool = Admission(100)
    small = [pool.admit(10) for _ in range(10)]
    large = pool.request(100)
    later = [pool.request(10) for _ in range(30)]
    for session in small:
        assert large.state == "waiting"
        session.end()
    assert large.state == "running" and {s.state for s in later} == {"waiting"}
    large.end()
    assert [s.state for s in later] == ["running"] * 10 + ["waiting"] * 20


def test_a_cancelled_waiter_leaves_the_line() -> None:
    pool = Admission(100)
    pool.admit(100)  # collected at once, so the pool is free again
    running = pool.admit(100)
    first, second = pool.request(50), pool.request(50)
    first.end()
    assert not first.wait(WAIT) and first.state == "ended" and pool.waiting == 1
    running.end()
    assert second.state == "running" and pool.running == 1


def test_a_waiter_that_gives_up_or_is_interrupted_leaves_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = Admission(100)
    running = pool.admit(100)
    with pytest.raises(AdmissionRefused, match=r"no room for 50 bytes within 0.01 s"):
        pool.admit(50, timeout=0.01)
    assert pool.waiting == 0

    def interrupted(self: Any, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr("diffcache.kv.session.Session.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.admit(50)
    assert (pool.waiting, pool.running) == (0, 1)
    running.end()


def test_a_full_line_refuses_the_next() -> None:
    pool = Admission(100, max_waiting=1)
    running = pool.admit(100)
    waiter = pool.request(10)
    with pytest.raises(AdmissionRefused, match="1 sessions wait already"):
        pool.request(10)
    running.end()
    assert waiter.state == "running"
    large = pool.request(100)
    with pytest.raises(AdmissionRefused, match="1 sessions wait already"):
        pool.request(1)  # it would fit, but may not overtake
    large.end()
    refuse = Admission(100, max_waiting=0)
    with refuse.admit(100), pytest.raises(AdmissionRefused, match="0 sessions wait already"):
        refuse.admit(1)
    refuse.admit(100)


def test_sessions_that_died_give_their_bytes_back_even_in_a_cycle() -> None:
    pool = Admission(100)
    for _ in range(3):
        session: Any = pool.admit(100)
        loop = [session]
        loop.append(loop)
        waiting = pool.request(60)
        del session, loop
        gc.collect()
        assert waiting.state == "running" and pool.used == 60
        del waiting
        gc.collect()
        assert pool.used == 0
    with pytest.raises(ZeroDivisionError), pool.admit(100):
        _ = 1 / 0
    assert pool.used == 0


def test_a_pool_that_is_let_go_of_is_freed_with_sessions_still_in_line() -> None:
    pool = Admission(100)
    sessions: Any = [pool.admit(100), pool.request(50)]
    gone = weakref.ref(pool)
    del pool, sessions
    gc.collect()
    assert gone() is None


def test_a_session_that_dies_under_the_lock_is_seen_to_when_it_is_left() -> None:
    pool = Admission(100)
    session: Any = pool.admit(100)
    waiting = pool.request(60)
    with pool._at_peace():
        del session
        gc.collect()
        assert waiting.state == "waiting"
    assert waiting.state == "running"


def test_many_threads_never_exceed_the_pool_and_all_get_their_turn() -> None:
    pool, rng = Admission(1000), random.Random(3)
    wants = [rng.randrange(1, 600) for _ in range(60)]
    most, done, lock = [0], [0], threading.Lock()

    def work(nbytes: int) -> None:
        for _ in range(5):
            session = pool.admit(nbytes, timeout=WAIT)
            session.frame(0.0)
            used = pool.used
            with lock:
                most[0], done[0] = max(most[0], used), done[0] + 1
            if nbytes % 2:  # every other one forgets to end
                session.end()
            del session

    threads = [threading.Thread(target=work, args=(nbytes,)) for nbytes in wants]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert done[0] == 300 and 500 < most[0] <= 1000
    assert (pool.used, pool.running, pool.waiting) == (0, 0, 0)


def periods(pool: Admission, clock: Clock, sessions: list[Any], times: list[float]) -> None:
    """One period of a second in which the sessions report these frame times by turns."""
    for n, seconds in enumerate(times):
        sessions[n % len(sessions)].frame(seconds)
    clock.now += 1
    sessions[0].frame(times[0])


def test_one_more_may_run_after_clean_periods_and_fewer_after_a_late_one(clock: Clock) -> None:
    pool = Admission(10**6, clock=clock, deadline_s=0.1, clean_periods=3)
    line = [pool.request(1) for _ in range(40)]

    def running() -> list[Any]:
        return [session for session in line if session.state == "running"]

    assert len(running()) == pool.limit == 1
    for wanted in range(2, 11):
        for _ in range(3):
            assert len(running()) == pool.limit == wanted - 1
            periods(pool, clock, running(), [0.079] * 40)
        assert len(running()) == pool.limit == wanted
    # One slow frame of 41 is no 95th percentile; three are.
    periods(pool, clock, running(), [0.079] * 39 + [9.0])
    assert pool.limit == 10
    periods(pool, clock, running(), [0.079] * 37 + [0.081] * 3)
    assert pool.limit == 7 and len(running()) == 10, "nobody who runs is sent away"
    periods(pool, clock, running(), [0.081] * 40)
    assert pool.limit == 7, "three too many still run, which says nothing about seven"
    for session in running()[:4]:
        session.end()
    assert len(running()) == 7
    periods(pool, clock, running(), [0.081] * 40)
    assert pool.limit == 4
    for _ in range(9):
        for session in running()[1:]:
            session.end()
        periods(pool, clock, running(), [1.0])
    assert pool.limit == 1 == len(running())


def test_places_left_empty_prove_nothing(clock: Clock) -> None:
    pool = Admission(100, clock=clock, deadline_s=0.1, start=2)
    session = pool.admit(1)
    for _ in range(20):
        periods(pool, clock, [session], [0.01])
    assert pool.limit == 2


def test_an_overloaded_device_settles_at_what_it_can_carry(clock: Clock) -> None:
    # A device that serves all sessions in turn, 5 ms each: 16 fit into 0.8 of 100 ms.
    pool = Admission(10**6, clock=clock, deadline_s=0.1, clean_periods=1)
    line: list[Any] = []
    seen = []
    for _ in range(400):
        line = [session for session in line if session.state != "ended"]
        line += [pool.request(1) for _ in range(40 - len(line))]
        now = [session for session in line if session.state == "running"]
        periods(pool, clock, now, [0.005 * len(now)] * len(now))
        seen.append(len(now))
        now[0].end()  # the oldest
    assert max(seen[100:]) == 17 and min(seen[100:]) >= 10
    assert sum(seen[100:]) / 300 > 0.8 * 16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pool_bytes": 0}, "pool_bytes must be an integer of at least 1, got 0"),
        ({"deadline_s": 0}, "deadline_s must be more than 0 seconds, got 0"),
        ({"deadline_s": float("nan")}, "deadline_s must be more than 0"),
        ({"period_s": -1}, "period_s must be more than 0"),
        ({"decrease": 1.0}, r"decrease must be in \(0, 1\), got 1.0"),
        ({"headroom": 0}, r"headroom must be in \(0, 1\)"),
        ({"horizon_s": -1}, "horizon_s must be at least 0"),
        ({"start": 0}, "start must be an integer of at least 1"),
        ({"max_waiting": -1}, "max_waiting must be an integer of at least 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Admission(**{"pool_bytes": 1, **settings})


def test_bad_calls_are_refused() -> None:
    pool = Admission(10)
    session = pool.admit(1)
    waiting = pool.request(10)
    with pytest.raises(ValueError, match="nbytes must be an integer of at least 0, got -1"):
        session.hold(-1)
    with pytest.raises(ValueError, match="seconds must be at least 0, got nan"):
        session.frame(float("nan"))
    with pytest.raises(ValueError, match="count must be an integer of at least 1"):
        session.frame(0.1, 0)
    with pytest.raises(AdmissionRefused, match="this session is waiting"):
        waiting.frame(0.1)
    session.end()
    session.end()
    with pytest.raises(AdmissionRefused, match="this session is ended"):
        session.hold(1)

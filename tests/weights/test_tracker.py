"""The access tracker: counts, window, last use, build time, hot set; a fake clock, and a plain list as the oracle."""

import itertools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulator import Clock

from everwarm.weights.cache.tracker import AccessTracker


def tracker_and_clock(window_s: float = 16.0, buckets: int = 16) -> tuple[AccessTracker, Clock]:
    clock = Clock()
    return AccessTracker(window_s, clock, buckets), clock


def one_pass(tracker: AccessTracker, clock: Clock, names: str, takes_s: float = 1.0) -> None:
    for name in names:
        tracker.record(name)
    clock.now += takes_s
    tracker.tick()


def test_a_pass_counts_when_it_is_over() -> None:
    tracker, clock = tracker_and_clock()
    tracker.record("a")
    assert (tracker.count("a"), tracker.rate("a"), tracker.last_use("a")) == (0, 0.0, None)
    clock.now += 1
    tracker.tick()
    assert (tracker.count("a"), tracker.rate("a"), tracker.last_use("a")) == (1, 1.0, clock.now)


def test_several_accesses_may_be_told_at_once() -> None:
    tracker, clock = tracker_and_clock()
    tracker.record("a", 3)
    tracker.record("a")
    one_pass(tracker, clock, "ab")
    assert (tracker.count("a"), tracker.count("b")) == (5, 1)


def test_in_the_middle_of_a_scan_all_rates_are_equal() -> None:
    tracker, clock = tracker_and_clock()
    one_pass(tracker, clock, "abcd")
    tracker.record("a")
    tracker.record("b")
    assert {tracker.rate(name) for name in "abcd"} == {1.0}


def test_accesses_leave_the_window() -> None:
    tracker, clock = tracker_and_clock(window_s=16)
    one_pass(tracker, clock, "aab")
    for _ in range(15):
        one_pass(tracker, clock, "b")
    assert (tracker.count("a"), tracker.count("b")) == (2, 16)
    one_pass(tracker, clock, "b")
    assert (tracker.count("a"), tracker.count("b")) == (0, 16)
    assert tracker.rate("b") == 1.0


def test_a_bucket_stays_as_long_as_its_newest_access_is_in_the_window() -> None:
    tracker, clock = tracker_and_clock(window_s=16, buckets=1)
    for _ in range(31):  # 16 passes in a first bucket, 15 in a second
        one_pass(tracker, clock, "a")
    assert tracker.count("a") == 31
    one_pass(tracker, clock, "a", takes_s=9)  # the first is over; half of the second is still in the window
    assert tracker.count("a") == 16


def test_a_long_pause_empties_the_window() -> None:
    tracker, clock = tracker_and_clock()
    one_pass(tracker, clock, "ab")
    one_pass(tracker, clock, "", takes_s=1000)
    assert (tracker.count("a"), tracker.rate("a")) == (0, 0.0)


def test_the_rate_is_per_second_since_the_start_until_the_window_is_full() -> None:
    tracker, clock = tracker_and_clock(window_s=100)
    one_pass(tracker, clock, "aaaa", takes_s=10)
    assert tracker.rate("a") == 0.4
    one_pass(tracker, clock, "a", takes_s=10)
    assert tracker.rate("a") == 0.25


def test_the_rate_of_a_tracker_without_age_takes_one_bucket_as_its_age() -> None:
    tracker, clock = tracker_and_clock(window_s=16, buckets=8)
    one_pass(tracker, clock, "aaaa", takes_s=0)
    assert tracker.rate("a") == 2.0


def test_last_use_orders_names_by_the_pass_that_used_them() -> None:
    tracker, clock = tracker_and_clock(buckets=1)
    for names in ("abc", "ca", "b", "c"):
        one_pass(tracker, clock, names)
    assert sorted("abc", key=lambda name: tracker.last_use(name) or 0) == ["a", "b", "c"]
    assert tracker.last_use("z") is None


def test_build_time_falls_fast_and_rises_slowly() -> None:
    tracker, _ = tracker_and_clock()
    assert tracker.seconds("a") is None
    tracker.materialised("a", 4.0)
    assert tracker.seconds("a") == 4.0
    tracker.materialised("a", 2.0)
    assert tracker.seconds("a") == 3.0
    tracker.materialised("a", 5.0)
    assert tracker.seconds("a") == pytest.approx(3.2)


def test_one_very_slow_build_moves_the_average_by_a_tenth() -> None:
    tracker, _ = tracker_and_clock()
    for seconds in (1.0, 25.0):
        tracker.materialised("a", seconds)
    assert tracker.seconds("a") == pytest.approx(1.1)


def test_a_build_that_took_no_time_is_no_average_to_go_by() -> None:
    tracker, _ = tracker_and_clock()
    for seconds in (0.0, 3.0):
        tracker.materialised("a", seconds)
    assert tracker.seconds("a") == 3.0


def test_a_lasting_change_of_build_time_is_followed() -> None:
    tracker, _ = tracker_and_clock()
    tracker.materialised("a", 1.0)
    for _ in range(60):
        tracker.materialised("a", 25.0)
    assert tracker.seconds("a") == pytest.approx(25, rel=0.05)


@given(
    st.lists(st.tuples(st.text("abc", max_size=5), st.floats(0, 7)), max_size=60),
    st.floats(1, 30),
    st.integers(1, 20),
)
def test_nothing_is_lost_within_the_window_and_nothing_stays_a_bucket_longer(
    passes: list[tuple[str, float]], window_s: float, buckets: int
) -> None:
    tracker, clock = tracker_and_clock(window_s, buckets)
    happened: list[tuple[float, str]] = []
    for names, takes_s in passes:
        one_pass(tracker, clock, names, takes_s)
        happened += [(clock.now, name) for name in names]
        inside = Counter(name for at, name in happened if at > clock.now - window_s)
        nearly = Counter(name for at, name in happened if at > clock.now - window_s * (1 + 1 / buckets) - 1e-9)
        for name in "abc":
            assert inside[name] <= tracker.count(name) <= nearly[name]
            assert tracker.last_use(name) == max((at for at, other in happened if other == name), default=None)


@pytest.fixture
def impatient_threads() -> Iterator[None]:
    """Switches between threads as often as the interpreter can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("impatient_threads")
def test_threads_may_record_tick_and_read_at_once() -> None:
    tracker = AccessTracker(0.05)
    numbers = itertools.count()  # ever new names, so that dictionaries grow all the time
    stop = time.monotonic() + 0.5

    def record() -> None:
        tracker.record(f"t{next(numbers)}")

    def read() -> None:
        tracker.rate("a")
        tracker.count("a")

    def again_and_again(action: Callable[[], None]) -> None:
        while time.monotonic() < stop:
            action()

    with ThreadPoolExecutor(5) as threads:
        running = [threads.submit(again_and_again, action) for action in (record, record, tracker.tick, read, read)]
    for one in running:
        one.result()


@pytest.mark.parametrize(("window_s", "buckets"), [(0, 16), (-1, 16), (1, 0)])
def test_a_window_without_length_is_refused(window_s: float, buckets: int) -> None:
    with pytest.raises(ValueError, match="must be above 0"):
        AccessTracker(window_s, buckets=buckets)

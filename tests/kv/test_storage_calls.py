"""Calls to a storage that fails: tried again until a deadline, and not at all while it does not answer."""

from collections.abc import Callable

import pytest

from everwarm.kv.remote.calls import FAILURES, MOST_REST_S, REST_S, Breaker, Calls
from everwarm.kv.remote.objects import RefusedError
from everwarm.kv.warm.blockstore import AwayError


class Time:
    """A clock that goes on when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def calls(time: Time) -> Calls:
    return Calls(clock=time, sleep=time.sleep)


def failing(times: int) -> Callable[[], str]:
    left = [times]

    def call() -> str:
        if left[0]:
            left[0] -= 1
            raise AwayError("connection reset")
        return "answer"

    return call


def test_a_failure_is_tried_again_after_pauses_that_grow(calls: Calls, time: Time) -> None:
    assert calls.run(failing(3), 60.0) == "answer"
    assert len(time.slept) == 3
    assert time.slept[0] <= 0.05 < 2 * time.slept[2]


def test_after_the_deadline_it_is_given_up(calls: Calls, time: Time) -> None:
    with pytest.raises(AwayError, match="connection reset"):
        calls.run(failing(4), 0.1)
    assert time.now < 100.2


@pytest.mark.parametrize("answer", [FileNotFoundError(2, "no"), RefusedError("no rights"), ValueError("a bug")])
def test_an_answer_is_not_tried_again(calls: Calls, time: Time, answer: Exception) -> None:
    def call() -> None:
        raise answer

    with pytest.raises(type(answer)):
        calls.run(call, 60.0)
    assert not time.slept
    assert not calls.breaker.is_open


def test_failures_in_a_row_open_the_breaker_and_nobody_waits_any_more(calls: Calls, time: Time) -> None:
    with pytest.raises(AwayError):
        calls.run(failing(99), 3600.0)
    assert calls.breaker.is_open
    before, asked = time.now, failing(0)
    with pytest.raises(AwayError, match=r"does not answer \(connection reset\)"):
        calls.run(asked, 3600.0)
    assert time.now == before


def test_after_a_rest_one_call_is_let_through_and_its_success_closes_the_breaker(time: Time) -> None:
    breaker = Breaker(time)
    for _ in range(FAILURES):
        breaker.failed("no")
    time.now += REST_S
    breaker.enter()
    with pytest.raises(AwayError):  # one at a time
        breaker.enter()
    breaker.succeeded()
    breaker.enter()
    breaker.enter()


def test_rests_grow_up_to_a_bound(time: Time) -> None:
    breaker = Breaker(time)
    rests = []
    for _ in range(FAILURES - 1):
        breaker.failed("no")
    for _ in range(10):
        breaker.failed("no")
        begin = time.now
        while True:
            try:
                breaker.enter()
                break
            except AwayError:
                time.now += 0.25
        rests.append(time.now - begin)
    assert rests[:3] == [1.0, 2.0, 4.0]
    assert max(rests) == MOST_REST_S


def test_answers_that_come_too_late_open_the_breaker_too(calls: Calls, time: Time) -> None:
    for _ in range(FAILURES):
        assert calls.run(lambda: time.sleep(20.0), 10.0) is None
    with pytest.raises(AwayError, match="an answer took 20 s"):
        calls.run(lambda: None, 10.0)

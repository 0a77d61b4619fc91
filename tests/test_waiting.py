"""Lines and cancellation: in order, without polling, nobody lost."""

import threading
import time
from collections.abc import Callable

from everwarm.waiting import Cancellation, Line


def one_at_a_time(inside: object, one: object) -> bool:
    return not inside


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def in_line(line: Line[str], came: list[tuple[str, int]], done: list[str]) -> list[threading.Thread]:
    """Threads that wait, in this order; each goes out as soon as it is in."""
    threads = []
    for name, priority in came:

        def go(name: str = name, priority: int = priority) -> None:
            assert line.enter(name, priority)
            done.append(name)
            line.leave(name)

        threads.append(threading.Thread(target=go))
        threads[-1].start()
        until(lambda: line.waiting == len(threads))
    return threads


def test_the_more_important_go_first_and_of_equals_who_came_first() -> None:
    line, done = Line[str](one_at_a_time), list[str]()
    assert line.try_enter("owner")
    threads = in_line(line, [("a", 0), ("b", 5), ("c", 0), ("d", 5), ("e", -1), ("f", 0)], done)
    assert not line.try_enter("eager")
    line.leave("owner")
    line.leave("owner")  # once is enough
    for thread in threads:
        thread.join(30)
    assert done == ["b", "d", "a", "c", "f", "e"]
    assert (line.inside, line.waiting) == ([], 0)


def test_nobody_overtakes_who_needs_more() -> None:
    line, done = Line[str](lambda inside, one: len("".join(inside)) + len(one) <= 4), list[str]()
    assert line.enter("aaa")
    threads = in_line(line, [("bb", 0), ("c", 0)], done)
    assert done == []
    assert not line.try_enter("d")  # it would fit, but others were first
    line.leave("aaa")
    for thread in threads:
        thread.join(30)
    assert sorted(done) == ["bb", "c"]


def test_cancelling_wakes_one_that_waits_and_lets_the_next_in() -> None:
    line, said = Line[str](lambda inside, one: len("".join(inside)) + len(one) <= 4), Cancellation()
    assert line.enter("aaa")
    heard: list[bool] = []
    large = threading.Thread(target=lambda: heard.append(line.enter("bb", cancelled=said)))
    large.start()
    until(lambda: line.waiting == 1)
    small = threading.Thread(target=lambda: heard.append(line.enter("c")))
    small.start()
    until(lambda: line.waiting == 2)
    said.set()
    large.join(30)
    small.join(30)
    assert sorted(heard) == [False, True]
    assert line.inside == ["aaa", "c"]


def test_who_was_cancelled_before_does_not_wait() -> None:
    line, said = Line[str](one_at_a_time), Cancellation()
    said.set()
    line.try_enter("owner")
    assert not line.enter("late", cancelled=said)
    assert line.waiting == 0


def test_many_threads_are_inside_one_at_a_time() -> None:
    line, most, inside = Line[int](one_at_a_time), 0, 0

    def work(number: int) -> None:
        nonlocal most, inside
        for _ in range(200):
            assert line.enter(number)
            inside += 1
            most = max(most, inside)
            inside -= 1
            line.leave(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (most, inside, line.inside, line.waiting) == (1, 0, [], 0)

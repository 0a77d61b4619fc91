"""The queue between threads and the event loop: nothing is lost, nothing changes places, nobody waits."""

import asyncio
import threading
from typing import Any

import pytest

from everwarm.events import Event
from everwarm.server.active_request import LoopQueue


def event(token: int, choice: int = 0) -> Event:
    return Event(token, 0.0, choice=choice)


async def take(queue: LoopQueue, count: int) -> list[Any]:
    taken: list[Any] = []
    while len(taken) < count:
        await queue.wait()
        taken += queue.take()
    return taken


def test_events_of_many_threads_arrive_each_in_its_order() -> None:
    async def read() -> list[Event]:
        queue = LoopQueue()

        def write(choice: int) -> None:
            for token in range(2000):
                queue.put(event(token, choice))

        threads = [threading.Thread(target=write, args=(choice,)) for choice in range(4)]
        for thread in threads:
            thread.start()
        taken = await take(queue, 8000)
        for thread in threads:
            thread.join()
        return taken

    taken = asyncio.run(asyncio.wait_for(read(), 60))
    for choice in range(4):
        assert [one.token for one in taken if one.choice == choice] == list(range(2000))


def test_the_loop_is_called_once_for_what_it_has_not_received(monkeypatch: pytest.MonkeyPatch) -> None:
    async def read() -> tuple[int, list[Any], int]:
        loop, calls = asyncio.get_running_loop(), []
        call = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda act: (calls.append(1), call(act)))
        queue = LoopQueue()
        for token in range(10):
            queue.put(event(token))
        before = len(calls)
        taken = await take(queue, 10)
        queue.put(event(10))
        await take(queue, 1)
        return before, taken, len(calls)

    before, taken, after = asyncio.run(read())
    assert (before, [one.token for one in taken], after) == (1, list(range(10)), 2)


def test_nothing_has_arrived_until_the_loop_has_received_it() -> None:
    async def read() -> list[int]:
        queue = LoopQueue()
        queue.put(event(1))
        found = [len(queue.take())]
        await queue.wait()
        return [*found, len(queue.take()), len(queue.take())]

    assert asyncio.run(read()) == [0, 1, 0]


def test_a_queue_whose_loop_has_ended_takes_events_and_forgets_them() -> None:
    async def make() -> LoopQueue:
        return LoopQueue()

    queue = asyncio.run(make())
    queue.put(event(1))
    queue.put(event(2))

"""From threads to the event loop, and to every client that reads: nothing is lost, nothing changes places."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from everwarm.errors import CancelledError
from everwarm.events import End, Event, Failed, Usage
from everwarm.kv.receipt import Receipt
from everwarm.server import shared_answer
from everwarm.server.serving import Limits
from everwarm.server.shared_answer import AnswerReader, LoopQueue, SharedAnswer


def event(token: int, choice: int = 0) -> Event:
    return Event(token, 0.0, choice=choice)


def end(choice: int = 0) -> End:
    return End(Receipt(""), "stop", Usage(), choice=choice)


class Collected:
    """What a queue has brought to the loop."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.queue = LoopQueue(self.items.extend)

    async def wait(self, count: int) -> list[Any]:
        while len(self.items) < count:
            await asyncio.sleep(0)
        return self.items


def test_events_of_many_threads_arrive_each_in_its_order() -> None:
    async def read() -> list[Event]:
        collected = Collected()

        def write(choice: int) -> None:
            for token in range(2000):
                collected.queue.put(event(token, choice))

        threads = [threading.Thread(target=write, args=(choice,)) for choice in range(4)]
        for thread in threads:
            thread.start()
        taken = await collected.wait(8000)
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
        collected = Collected()
        for token in range(10):
            collected.queue.put(event(token))
        before = len(calls)
        await collected.wait(10)
        collected.queue.put(event(10))
        return before, await collected.wait(11), len(calls)

    before, taken, after = asyncio.run(read())
    assert (before, [one.token for one in taken], after) == (1, list(range(11)), 2)


def test_a_queue_whose_loop_has_ended_takes_events_and_forgets_them() -> None:
    async def make() -> LoopQueue:
        return LoopQueue(lambda items: None)

    queue = asyncio.run(make())
    queue.put(event(1))
    queue.put(event(2))


# Readers --------------------------------------------------------------------------------------------------------------


class Work:
    """Stands for a generation and for the server that runs it."""

    def __init__(self) -> None:
        self.begun: list[Work] = []
        self.ended_: list[Work] = []
        self.cancelled = 0
        self.queue: LoopQueue | None = None
        self.receipt = None
        self.limits = Limits()

    def run(self, generation: "Work", queue: LoopQueue) -> None:
        self.begun.append(generation)
        self.queue = queue

    def ended(self, generation: "Work") -> None:
        self.ended_.append(generation)

    def cancel(self) -> None:
        self.cancelled += 1


def shared(serving: Work, generations: list[Work]) -> SharedAnswer:
    return SharedAnswer(serving, generations, lambda: None)  # type: ignore[arg-type, return-value]


async def arrive(serving: Work, *items: Any) -> None:
    assert serving.queue is not None
    for item in items:
        serving.queue.put(item)
    await asyncio.sleep(0.001)


def tokens(reader: AnswerReader) -> list[Any]:
    return [item.token if isinstance(item, Event) else type(item).__name__ for item in reader.take()]


def in_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 30))  # type: ignore[arg-type]

    run.__name__ = test.__name__
    return run


@in_loop
async def test_every_reader_gets_all_from_the_first_event_on() -> None:
    serving, generation = Work(), Work()
    answer = shared(serving, [generation])
    first = answer.read()
    answer.begin()
    answer.begin()
    assert serving.begun == [generation]
    await arrive(serving, event(1), event(2))
    assert tokens(first) == [1, 2]
    second = answer.read()
    assert (tokens(second), tokens(second), tokens(first)) == ([1, 2], [], [])
    waiting = [asyncio.ensure_future(reader.wait()) for reader in (first, second)]
    await arrive(serving, event(3), end())
    await asyncio.gather(*waiting)
    assert (tokens(first), tokens(second)) == ([3, "End"], [3, "End"])
    assert (answer.over, answer.can_be_joined, serving.ended_) == (True, False, [generation])


@in_loop
async def test_only_the_last_reader_that_leaves_cancels() -> None:
    serving, generation = Work(), Work()
    answer, over = shared(serving, [generation]), []
    answer.when_over(lambda: over.append(1))
    readers = [answer.read() for _ in range(3)]
    answer.begin()
    for reader in readers[:2]:
        reader.close()
        reader.close()
    assert (generation.cancelled, answer.over) == (0, False)
    await arrive(serving, event(1))
    assert tokens(readers[2]) == [1]
    readers[2].close()
    assert (generation.cancelled, answer.over, over, serving.ended_) == (1, True, [1], [generation])
    await arrive(serving, Failed(CancelledError("cancelled")))
    assert over == [1]


@in_loop
async def test_an_answer_that_was_cancelled_is_not_joined() -> None:
    """Its generation may take a moment to end. Who asks meanwhile has cancelled nothing."""
    serving, generation = Work(), Work()
    answer = shared(serving, [generation])
    reader = answer.read()
    answer.begin()
    await arrive(serving, event(1))
    assert answer.can_be_joined
    answer.cancel()
    assert (generation.cancelled, answer.over, answer.can_be_joined) == (1, False, False)
    await arrive(serving, Failed(CancelledError("cancelled")))
    assert (tokens(reader), answer.over) == ([1, "Failed"], True)


@in_loop
async def test_other_choices_begin_with_the_first_token_and_a_failure_ends_all() -> None:
    serving, generations = Work(), [Work(), Work(), Work()]
    answer = shared(serving, generations)
    reader = answer.read()
    answer.begin()
    assert serving.begun == generations[:1]
    await arrive(serving, event(1))
    assert serving.begun == generations
    await arrive(serving, end(0), event(7, 2), Failed(ValueError("odd"), 1), event(8, 2))
    assert tokens(reader) == [1, "End", 7, "Failed"]
    assert ([one.cancelled for one in generations], answer.over) == ([0, 0, 1], True)
    assert set(map(id, serving.ended_)) == set(map(id, generations))


@in_loop
async def test_a_long_answer_forgets_what_all_have_read_and_is_not_joined() -> None:
    serving = Work()
    answer = shared(serving, [Work()])
    slow, quick = answer.read(), answer.read()
    answer.begin()
    most = shared_answer.MOST_KEPT
    await arrive(serving, *map(event, range(most)))
    assert answer.can_be_joined
    assert tokens(quick) == list(range(most))
    await arrive(serving, event(most))
    assert not answer.can_be_joined
    assert tokens(slow) == list(range(most + 1))
    await arrive(serving, event(most + 1))
    assert len(answer.items(answer._forgotten)) < 3
    assert (tokens(quick), tokens(slow)) == ([most, most + 1], [most + 1])


def test_several_prompts_have_their_choices_one_after_the_other() -> None:
    """Two prompts with two choices each: the second choice of a prompt begins with the first token of the first."""

    async def read() -> list[int]:
        work = Work()
        generations: Any = [Work() for _ in range(4)]
        answer = SharedAnswer(work, generations, lambda: None, prompts=2)  # type: ignore[arg-type, return-value]
        reader = answer.read()
        answer.begin()
        begun = [generations.index(one) for one in work.begun]
        assert (begun, answer.has_several_prompts) == ([0, 2], True)
        assert work.queue is not None
        work.queue.put(event(1, choice=2))
        await reader.wait()
        for choice in (2, 3, 0):
            work.queue.put(event(1, choice=choice))
            work.queue.put(end(choice))
        while not answer.over and len(work.begun) < 4:
            await asyncio.sleep(0)
        assert not answer.over
        work.queue.put(end(1))
        while not answer.over:
            await asyncio.sleep(0)
        reader.close()
        return [generations.index(one) for one in work.begun]

    assert asyncio.run(asyncio.wait_for(read(), 60)) == [0, 2, 3, 1]

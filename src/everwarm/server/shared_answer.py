"""The answer to a request while it is made: its generations, and all of their events so far.

Threads put events in (the engine's thread for tokens, a thread of the request for its end); the event loop takes them
out. Every client that reads the answer has a reader of its own, which begins with the first event. So a client that
sends the same request again can join an answer that is being made. When the last reader has left, it is cancelled.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence

from everwarm.events import End, Event, Failed
from everwarm.kv.receipt import Receipt
from everwarm.llm import Generation
from everwarm.server.serving import Serving
from everwarm.server.wire import Wire

Item = Event | End | Failed

MOST_KEPT = 4096
"""Events that are kept for those who may join. A longer answer can't be joined any more, and forgets what all of its
readers have read."""


class LoopQueue:
    """From any thread to the event loop that made it, which is called when something has arrived."""

    def __init__(self, arrived: Callable[[list[Item]], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = arrived
        self._sent: deque[Item] = deque()  # by threads
        self._called = False  # the loop will be there for what was sent

    def put(self, item: Item, /) -> None:
        """Never waits. The loop is called once for all that it has not received yet."""
        self._sent.append(item)
        if not self._called:
            self._called = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads
                self._loop.call_soon_threadsafe(self._receive)

    def _receive(self) -> None:
        self._called = False  # before the items are received: what is sent later calls again
        items = []
        while self._sent:
            items.append(self._sent.popleft())
        self._arrived(items)


class SharedAnswer:
    """The choices of one request. The first belongs to the agent; the others begin once its prompt is computed and are
    not kept. A request with several prompts has choices of each, one prompt after the other.
    """

    def __init__(
        self,
        serving: Serving,
        generations: Sequence[Generation],
        wire: Callable[[], Wire],
        idempotency_key: str = "",
        prompts: int = 1,
    ) -> None:
        """`wire` makes what writes the answer for one client."""
        self._serving, self._generations = serving, generations
        self.wire, self.idempotency_key = wire, idempotency_key
        self._queue = LoopQueue(self._receive)
        self._running: dict[int, Generation] = {}  # by the number of the choice
        self._items: list[Item] = []
        self._forgotten = 0  # items before those
        self._readers: set[AnswerReader] = set()
        self._when_over: list[Callable[[], object]] = []
        self._of_a_prompt = len(generations) // prompts  # choices
        self._waiting = deque(range(0, len(generations), self._of_a_prompt))  # choices that can begin
        self._answered: set[int] = set()  # first choices that have said something
        self.begun = self.over = False  # over: nothing more will come
        self._cancelled = False

    @property
    def choices(self) -> int:
        return len(self._generations)

    @property
    def first(self) -> Generation:
        """The generation of the first choice."""
        return self._generations[0]

    @property
    def receipt(self) -> Receipt | None:
        """Of the first choice, as far as it is known: whole when that has ended."""
        return self.first.receipt

    @property
    def receipts(self) -> list[Receipt]:
        """Of the first choice of each prompt, as far as they are known."""
        firsts = self._generations[:: self._of_a_prompt]
        return [generation.receipt for generation in firsts if generation.receipt is not None]

    @property
    def has_several_prompts(self) -> bool:
        return self._of_a_prompt < len(self._generations)

    @property
    def can_be_joined(self) -> bool:
        goes_on = self.begun and not self.over and not self._cancelled
        return goes_on and len(self._items) + self._forgotten <= MOST_KEPT

    def begin(self) -> None:
        """Have the first choice of each prompt computed, unless that is being done."""
        if not self.begun:
            self.begun = True
            self._run_waiting()

    def read(self) -> "AnswerReader":
        """Another reader, from the first event on. It must be closed."""
        reader = AnswerReader(self)
        self._readers.add(reader)
        return reader

    def when_over(self, call: Callable[[], object]) -> None:
        """Have a function called when nothing more will come."""
        self._when_over.append(call)

    def cancel(self) -> None:
        """End it before its time; whoever reads it is told."""
        self._cancelled = True
        self._waiting.clear()
        for generation in self._running.values():
            generation.cancel()

    def items(self, begin: int) -> list[Item]:
        """What has arrived, from an item on that was not forgotten."""
        return self._items[begin - self._forgotten :]

    def leave(self, reader: "AnswerReader") -> None:
        """A reader reads no more. After the last one, what has not ended is cancelled."""
        self._readers.discard(reader)
        if not self._readers and not self.over:
            self.cancel()
            self._end()

    def _run_waiting(self) -> None:
        """As many at once as a request may have choices: others have their turn, too."""
        while self._waiting and len(self._running) < self._serving.limits.most_choices:
            number = self._waiting.popleft()
            self._running[number] = self._generations[number]
            self._serving.run(self._generations[number], self._queue)

    def _receive(self, items: list[Item]) -> None:
        """On the event loop."""
        for item in items:
            if self.over:  # cancelled, or another choice has failed
                break
            self._items.append(item)
            if isinstance(item, Event):
                self._begin_others(item.choice)
            else:
                self._ended(item)
        if len(self._items) + self._forgotten > MOST_KEPT:
            read = min((reader.at for reader in self._readers), default=0) - self._forgotten
            del self._items[:read]
            self._forgotten += read
        for reader in self._readers:
            reader.arrived.set()

    def _begin_others(self, choice: int) -> None:
        """The prompt of a choice is computed: the other choices of that prompt go on from it."""
        if choice % self._of_a_prompt == 0 and choice not in self._answered:
            self._answered.add(choice)
            self._waiting.extendleft(reversed(range(choice + 1, choice + self._of_a_prompt)))
            self._run_waiting()

    def _ended(self, item: End | Failed) -> None:
        self._serving.ended(self._running.pop(item.choice))
        if isinstance(item, Failed):
            self.cancel()  # nobody will read the other choices
        self._run_waiting()
        if isinstance(item, Failed) or not self._running:
            self._end()

    def _end(self) -> None:
        self.over = True
        for generation in self._running.values():
            self._serving.ended(generation)
        self._running.clear()
        for call in self._when_over:
            call()


class AnswerReader:
    """How far one client has read an answer."""

    def __init__(self, answer: SharedAnswer) -> None:
        self.answer = answer
        self.at = 0  # items that were taken
        self.arrived = asyncio.Event()

    def take(self) -> list[Item]:
        """All that has arrived since."""
        self.arrived.clear()
        items = self.answer.items(self.at)
        self.at += len(items)
        return items

    async def wait(self) -> None:
        """Until something has arrived since the last `take`. An answer that has ended may never have more."""
        await self.arrived.wait()

    def close(self) -> None:
        """Read no more; once is enough."""
        self.answer.leave(self)

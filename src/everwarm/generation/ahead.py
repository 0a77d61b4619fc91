"""Prefill ahead: while nobody asks for anything, a history is computed as the next request will show it.

A chat template may write earlier turns anew: the reasoning of an answer goes when the user speaks again, tools move to
the last message. Everything from there on has to be computed once more; here that happens after the turn and not when
somebody waits. It takes nothing from anybody: steps are short, memory and disk must be free, and any request ends it.
What was computed by then is found by whoever needs it.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from everwarm.engine.admission import Room
from everwarm.engine.engine import Engine
from everwarm.engine.sampler import SampledToken, Sampler
from everwarm.engine.sampling import Sampling
from everwarm.engine.sequence import Sequence as EngineSequence
from everwarm.errors import EverwarmError
from everwarm.generation.replay import Reader, replay
from everwarm.generation.runtime import Runtime
from everwarm.kv.answers import answers_by_digest
from everwarm.kv.store import AgentStore
from everwarm.text.history import tokenise, wanted_runs
from everwarm.types import Segment
from everwarm.waiting import Cancellation

_log = logging.getLogger(__name__)

SETTLE_S = 0.3
"""How long nobody must have asked for anything: most clients go on at once, or take their time."""
MOST_JOBS = 32
LEAST_TOKENS = 32
"""Fewer are computed quickly enough when they are needed."""


@dataclass(frozen=True, slots=True)
class Job:
    """A history that will come back."""

    tenant: str
    agent: str
    prompt: Callable[[], tuple[list[Segment], bool] | None]  # how the next prompt begins, and whether with BOS
    reader: Reader


class Ahead:
    """The histories of one model that may be computed ahead. One thread, made when it is first needed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._jobs: OrderedDict[tuple[str, str], tuple[Runtime, Job]] = OrderedDict()  # the latest last
        self._active = 0  # requests that run
        self._sequence: EngineSequence | None = None  # what is being computed
        self._busy: tuple[str, str] | None = None  # tenant and agent whose history is being looked at or computed
        self._unwanted = False  # it is to be given up
        self._closed = False
        self._thread: threading.Thread | None = None
        self.tokens = 0  # computed so far

    @contextmanager
    def request(self, runtime: Runtime) -> Iterator[None]:
        """While somebody's request runs, nothing is computed ahead."""
        with self._changed:
            self._active += 1
            if self._sequence is not None:
                runtime.engine.cancel(self._sequence)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def offer(self, runtime: Runtime, job: Job) -> None:
        """This history has a new end."""
        with self._changed:
            if self._closed:
                return
            self._jobs.pop((job.tenant, job.agent), None)
            self._jobs[job.tenant, job.agent] = runtime, job
            if len(self._jobs) > MOST_JOBS:
                self._jobs.popitem(last=False)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="everwarm-ahead", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def forget(self, engine: Engine, tenant: str, agent: str) -> None:
        """Compute nothing for an agent that is to be removed. Returns when nothing is being computed for it."""
        with self._changed:
            self._jobs.pop((tenant, agent), None)
            if self._busy == (tenant, agent):
                self._unwanted = True
                if self._sequence is not None:
                    engine.cancel(self._sequence)
                self._changed.wait_for(lambda: self._busy != (tenant, agent))

    def close(self) -> None:
        """End the thread. The engine still runs."""
        with self._changed:
            self._closed = True
            if self._sequence is not None:
                self._sequence.cancelled = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _loop(self) -> None:
        while (taken := self._take()) is not None:
            runtime, job = taken
            try:
                done = self._compute(runtime, job)
            except EverwarmError as error:
                _log.debug("agent %s: nothing is computed ahead: %s", job.agent, error)
                done = True
            except Exception:
                _log.exception("agent %s: it could not be computed ahead", job.agent)
                done = True
            with self._changed:
                if not done and not self._unwanted:  # go on when there is time; a newer end of the history comes first
                    self._jobs.setdefault((job.tenant, job.agent), taken)
                self._busy, self._unwanted = None, False
                self._changed.notify_all()

    def _take(self) -> tuple[Runtime, Job] | None:
        """Wait until nobody asks for anything; the latest history. None at the end."""
        with self._changed:
            while not self._closed:
                if self._active or not self._jobs:
                    self._changed.wait()
                elif not self._changed.wait(SETTLE_S) and self._jobs:  # meanwhile one may have been forgotten
                    self._busy, taken = self._jobs.popitem(last=True)
                    return taken
            return None

    def _compute(self, runtime: Runtime, job: Job) -> bool:
        """Whether it is done, or can't be."""
        store = runtime.store
        if store is None or (ids := _next_ids(runtime, store, job)) is None:
            return True
        agent = store.find(job.agent, job.tenant)
        with store.open_ahead(agent, runtime.model.config.context) as turn:
            if not turn.begin_ahead(ids):
                return True
            known, end = turn.kv.length, _End()
            sampler = Sampler(Sampling(temperature=0.0), ids, runtime.model.config.vocab_size, runtime.rows, None)
            room = Room(runtime.admission, 0, Cancellation())  # never entered: the memory is taken already
            sequence = EngineSequence(turn, room, list(ids), sampler, end, idle=True)
            with self._changed:
                if self._active or self._closed or self._unwanted:
                    return False
                self._sequence = sequence
            try:
                runtime.engine.submit(sequence)
                end.wait()
            finally:
                with self._changed:
                    self._sequence = None
            self.tokens += max(0, turn.kv.length - known)
            turn.suspend()  # what was computed is known from now on
        return not sequence.cancelled


class _End:
    """Where the tokens of a sequence go that nobody wants: it is over with the first."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def accept(self, sampled: SampledToken) -> bool:
        return True

    def end(self, error: BaseException | None) -> None:
        self._over.set()

    def wait(self) -> None:
        self._over.wait()


def _next_ids(runtime: Runtime, store: AgentStore, job: Job) -> list[int] | None:
    """The tokens that the next prompt begins with; None if enough of them is known, or they don't fit."""
    agent = store.find(job.agent, job.tenant)
    history, prompt = store.peek(agent), job.prompt()
    if history is None or prompt is None:
        return None
    tokenizer = runtime.tokenizer
    answers = answers_by_digest(agent, history)
    runs = replay(wanted_runs(*prompt), tokenizer.end_texts, lambda digest: answers.get(digest, ()), job.reader).runs
    ids = tokenise(tokenizer, runs, history.runs, history.ids).ids
    fits = len(ids) < runtime.model.config.context
    return ids if fits and len(ids) - _common(ids, history.ids) >= LEAST_TOKENS else None


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    short = min(len(one), len(other))
    return next((at for at in range(short) if one[at] != other[at]), short)

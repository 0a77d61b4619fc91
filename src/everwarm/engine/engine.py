"""The engine: one thread, one loop. Sequences join and leave between steps.

    schedule -> run -> sample -> emit

A step is one flat batch: a row for each sequence that decodes, chunks for those that prefill. What is computed for a
sequence depends on its tokens alone, so who else is in the batch changes nothing. When memory runs out, the sequence
that came last goes to the warm tier and comes back later.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from queue import Empty, SimpleQueue

import numpy as np
import numpy.typing as npt

from everwarm.engine.scheduler import Kind, Part, Scheduler, decode
from everwarm.engine.sequence import Sequence
from everwarm.engine.shared_prefill import without_repetition
from everwarm.errors import CancelledError, CapacityError, EverwarmError
from everwarm.model.transformer import Span, Transformer

_log = logging.getLogger(__name__)

F32 = npt.NDArray[np.float32]


class Engine:
    """Computes what is submitted. The output of every sequence gets `end` once, whatever happens."""

    def __init__(self, model: Transformer, scheduler: Scheduler | None = None) -> None:
        self._model = model
        self._scheduler = scheduler or Scheduler()
        # A simple queue can be put into from anywhere: also by the garbage collector, on a thread that holds a lock.
        self._inbox: SimpleQueue[Sequence | Callable[[], None] | None] = SimpleQueue()  # None: close
        self._lock = threading.Lock()  # of starting and closing
        self._running: list[Sequence] = []
        self._closed = False
        self._thread: threading.Thread | None = None
        self.steps = self.preemptions = 0
        self.passes = self.drafted = self.accepted = 0  # of all sequences: see `Sequence`
        self.batch_sizes: Counter[int] = Counter()
        self.cancel_waits: Counter[int] = Counter()  # steps from a cancellation until the blocks were free

    def submit(self, sequence: Sequence) -> None:
        """It joins at the next step."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine is closed")
            self._inbox.put(sequence)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="everwarm-engine", daemon=True)
                self._thread.start()

    def cancel(self, sequence: Sequence) -> None:
        """It leaves before the next step; its output is told when it has."""
        if not sequence.cancelled:
            sequence.cancelled_at = self.steps
            sequence.cancelled = True

    def call_soon(self, function: Callable[[], None]) -> None:
        """Have a quick function called on the engine's thread between two steps. Takes no lock: the garbage collector
        may call it at any moment.
        """
        self._inbox.put(function)

    def close(self) -> None:
        """End all sequences, then the thread."""
        with self._lock:
            self._closed = True
            self._inbox.put(None)
            thread = self._thread
        if thread is not None:
            thread.join()

    @property
    def running(self) -> int:
        return len(self._running)

    def _loop(self) -> None:
        while self._admit():
            try:
                batch = self._schedule()
                if batch:
                    logits = self._run(batch)
                    self._emit(batch, logits)
            except Exception as error:  # a bug, or no memory: whoever was in the step is told, the loop goes on
                _log.exception("a step failed")
                for sequence in list(self._running):
                    self._end(sequence, error)

    def _admit(self) -> bool:
        """Take in who has arrived, let go of who was cancelled; waits if there is nothing to do. False at the end."""
        arrived, closed = self._read_inbox()
        # Whoever comes has had as much as the one that has had least: a stream of newcomers can't starve it.
        least = min((one.computed for one in self._running if one.pending > 1), default=0)
        for sequence in arrived:
            sequence.computed = max(sequence.computed, least)
        self._running += arrived
        for sequence in list(self._running):
            if closed:
                self._end(sequence, CancelledError("the model was closed"))
            elif sequence.cancelled:
                self._end(sequence, None)
        return not closed

    def _read_inbox(self) -> tuple[list[Sequence], bool]:
        """Sequences that have arrived, and whether we are to close; what else was asked for is done."""
        arrived: list[Sequence] = []
        closed = False
        while True:
            try:
                message = self._inbox.get(block=not (self._running or arrived or closed))
            except Empty:
                return arrived, closed
            if message is None:
                closed = True
            elif isinstance(message, Sequence):
                arrived.append(message)
            else:
                try:
                    message()
                except Exception:
                    _log.exception("a function that was called between two steps failed")

    def _schedule(self) -> list[Part]:
        """The rows of this step, with memory for each; whoever came last makes room."""
        batch = self._scheduler.choose(without_repetition(self._running))
        for part in list(batch):
            kv = part.sequence.turn.kv
            while part in batch:
                try:
                    kv.reserve(kv.length + part.rows, wait=self._alone())
                    part.sequence.room.grow(kv.size_bytes)
                    break
                except CapacityError as error:
                    if part.draft:  # nobody makes room for a draft
                        part, drafted = decode(part.sequence), part
                        batch[batch.index(drafted)] = part
                        continue
                    victim = min(self._running, key=lambda one: (one.priority, -one.arrival))
                    if self._alone():
                        self._end(victim, error)
                    else:
                        self._preempt(victim)
                    batch = [other for other in batch if other.sequence is not victim]
        return batch

    def _alone(self) -> bool:
        """Whether nobody else holds memory that will soon be free: not those who run, commit or restore."""
        return len(self._running) == 1 and self._running[0].room.admission.inside <= 1

    def _run(self, batch: list[Part]) -> F32 | None:
        started, spent_s = time.perf_counter(), self._model.backend.spent()["attention"]
        spans = []
        for part in batch:
            at = part.sequence.turn.kv.length
            rows = [*part.sequence.tokens[at : at + part.known], *part.draft]
            spans.append(Span(rows, part.sequence.turn.kv, part.rows - part.logits_rows))
        try:
            logits = self._model.forward(spans)
        except EverwarmError as error:
            for part in batch:
                self._end(part.sequence, error)
            return None
        seconds = time.perf_counter() - started
        self.steps += 1
        self.batch_sizes[len(batch)] += 1
        self._scheduler.took(batch, seconds, self._model.backend.spent()["attention"] - spent_s)
        for part in batch:
            if part.kind is Kind.PREFILL:
                part.sequence.computed += part.rows
                if len(batch) == 1 and not part.sequence.idle:
                    part.sequence.turn.computed(part.rows, seconds)
        return logits

    def _emit(self, batch: list[Part], logits: F32 | None) -> None:
        if logits is None:
            return
        at = 0
        for part in batch:
            rows = logits[at : at + part.logits_rows]
            at += part.logits_rows
            try:
                over = self._accept(part, rows)
                part.sequence.turn.seal_full(wait=False)  # accepted tokens only
                if over:
                    self._end(part.sequence, None)
            except Exception as error:  # of this request alone: the others go on
                self._end(part.sequence, error)

    def _accept(self, part: Part, rows: F32) -> bool:
        """Sample after each row while the draft has foreseen what comes; whether the sequence is over. The KV of tokens
        that the draft has got wrong is given back.
        """
        sequence, kv = part.sequence, part.sequence.turn.kv
        before, over, right = len(sequence.tokens), False, 0
        try:
            for number, row in enumerate(rows):
                if sequence.cancelled:
                    break
                sampled = sequence.sampler.sample(row)
                sequence.tokens.append(sampled.token)
                sequence.turn.append([sampled.token])
                over = sequence.output.accept(sampled)
                if over or number == len(part.draft) or part.draft[number] != sampled.token:
                    break
                right += 1
        finally:
            if part.draft:
                kv.truncate(kv.length - len(part.draft) + right)
        new = sequence.tokens[before:]
        if new:
            self._count(sequence, len(part.draft), right)
            if sequence.proposer is not None:
                sequence.proposer.accepted(new)
        return over

    def _count(self, sequence: Sequence, drafted: int, accepted: int) -> None:
        for counts in (self, sequence):
            counts.passes += 1
            counts.drafted += drafted
            counts.accepted += accepted

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._running.remove(sequence)
        try:
            sequence.turn.suspend()
            sequence.room.leave()
            threading.Thread(target=self._resume, args=(sequence,), name="everwarm-resume", daemon=True).start()
        except Exception as error:
            sequence.output.end(error)

    def _resume(self, sequence: Sequence) -> None:
        """A sequence has given up its memory to others: it joins again when there is memory for it."""
        try:
            sequence.room.enter(len(sequence.tokens))
            sequence.turn.resume()
            self.submit(sequence)
        except BaseException as error:
            sequence.output.end(error)

    def _end(self, sequence: Sequence, error: BaseException | None) -> None:
        self._running.remove(sequence)
        if sequence.cancelled:
            sequence.turn.kv.close()  # now: whoever asked may take its time to notice
            self.cancel_waits[self.steps - sequence.cancelled_at] += 1
        try:
            sequence.output.end(error)
        except Exception:
            _log.exception("a request's end could not be told")

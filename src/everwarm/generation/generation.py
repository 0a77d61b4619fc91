"""One request from prompt to end: the agent's turn, memory, the engine, the commit.

Everything that may wait (turns, memory, disks) happens in the reader's thread; the engine's thread samples and makes
events (`output`). Between the two is one queue. An iterator reads it itself (`events`). A server gives its own queue,
which its event loop reads, and a thread that waits (`run`).

An iterator that is not read to its end may be closed by the garbage collector, on any thread and with any lock held. So
closing it only puts a message into the engine's inbox; turn and memory are given back where the sequence ends.
"""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Protocol

from everwarm.engine.drafts.proposer import Proposer
from everwarm.engine.prefill import check_prompt, too_long
from everwarm.engine.sampler import Sampler
from everwarm.engine.sequence import Sequence
from everwarm.errors import CancelledError
from everwarm.events import End, Event, Failed, Usage
from everwarm.generation.ahead import Ahead, Job
from everwarm.generation.output import EventQueue, Output, Stopped, StopQueue
from everwarm.generation.replay import has_odd_calls, replay
from everwarm.generation.request import Request
from everwarm.generation.runtime import Runtime
from everwarm.kv.manifest import answer_places, text_digests
from everwarm.kv.receipt import Cause, Receipt, Why
from everwarm.kv.store import AgentStore
from everwarm.kv.turn import Alone, Turn
from everwarm.text.chat_format import with_answer
from everwarm.text.history import Prompt, answer_runs, goes_on, tokenise, wanted_runs
from everwarm.types import AnswerPlace, Run, Segment
from everwarm.waiting import Cancellation

LONG_TEXT = 1 << 16
"""Characters of a prompt that is long: it is measured before it is tokenised, and not tokenised beyond the context."""


class RequestQueue(EventQueue, Protocol):
    """The queue of a request: the events of all its choices, and how each of them ended."""

    def put(self, item: Event | End | Failed, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prompt is."""

    prompt_tokens: int
    computed: int  # of these, now or earlier


@dataclass(frozen=True, slots=True)
class _Computation:
    """What was submitted to the engine."""

    turn: Turn | None  # None: nothing is kept
    prompt: Prompt
    receipt: Receipt
    sampler: Sampler
    output: Output
    sequence: Sequence


class Generation:
    """Iterate over `events`, or `run` it with a queue: one of them, once. `cancel` from anywhere."""

    def __init__(self, runtime: Runtime, request: Request, ahead: Ahead | None = None) -> None:
        """`ahead`: who computes while nobody asks for anything. It waits while this runs."""
        self._runtime = runtime
        self._ahead = ahead
        self._request = request
        self._cancelled = Cancellation()
        self._sequence: Sequence | None = None
        self._prompt_of: Generation | None = None  # another choice of the same request, whose prompt this one takes
        self._ids: list[int] | None = None  # of the prompt, once it is tokenised
        self.receipt: Receipt | None = None  # once the prefix was looked up
        # Whether it says the same each time it is run.
        self.repeatable = request.sampling.temperature == 0 or request.sampling.seed is not None

    @property
    def progress(self) -> Progress | None:
        """How far the prompt is; None before its computation has begun. From any thread."""
        sequence, ids = self._sequence, self._ids
        if sequence is None or ids is None:
            return None
        return Progress(len(ids), min(sequence.turn.kv.length, len(ids)))

    def cancel(self) -> None:
        """The reader gets a CancelledError, soon; memory is free at the next step of the engine."""
        self._cancelled.set()
        if self._sequence is not None:
            self._runtime.engine.cancel(self._sequence)

    def another_choice(self, number: int, seed: int | None) -> "Generation":
        """Another answer to the same prompt, which is not kept. It goes on from the very tokens of this one, which must
        have begun: those depend on what its agent remembers.
        """
        sampling = replace(self._request.sampling, seed=seed)
        request = replace(self._request, sampling=sampling, agent=None, group="", keep=False, point=None, choice=number)
        other = Generation(self._runtime, request, self._ahead)
        other._prompt_of = self
        return other

    def events(self) -> Iterator[Event | End]:
        """An event per token, then the end. Raises what ended it before its time."""
        queue: SimpleQueue[Event | Stopped] = SimpleQueue()
        with self._held() as held:
            computation = self._submit(held, queue, queue)
            while isinstance(item := queue.get(), Event):
                yield item
            end = self._finish(computation, item)
        yield end

    def run(self, queue: RequestQueue) -> None:
        """Put an event per token into a queue, then the end or what ended it before its time. Returns then."""
        stopped: SimpleQueue[Stopped] = SimpleQueue()
        try:
            with ExitStack() as held:
                computation = self._submit(held, queue, stopped)
                end = self._finish(computation, stopped.get())
            queue.put(end)
        except BaseException as error:
            queue.put(Failed(error, self._request.choice))

    @contextmanager
    def _held(self) -> Iterator[ExitStack]:
        """What has to be given back at the end; by the engine if the iterator is closed before."""
        held = ExitStack()
        try:
            yield held
        except GeneratorExit:
            output = self._output
            output.abandon(held)
            self._runtime.engine.call_soon(self._leave)
            raise
        except BaseException:
            held.close()
            raise
        held.close()

    @property
    def _output(self) -> Output:
        assert self._sequence is not None
        assert isinstance(self._sequence.output, Output)
        return self._sequence.output

    def _leave(self) -> None:
        """The iterator was closed early. On the engine's thread."""
        self.cancel()
        self._output.give_back()

    def _submit(self, held: ExitStack, queue: EventQueue, stopped: StopQueue) -> _Computation:
        """Wait for whatever is needed, then hand the sequence to the engine."""
        runtime, request = self._runtime, self._request
        if self._ahead is not None:
            held.enter_context(self._ahead.request(runtime))
        if runtime.store is None:
            turn, prompt = None, self._tokenise_alone()
        else:
            turn = self._open_turn(held, runtime.store)
            prompt = self._tokenise(turn)
        ids = self._ids = prompt.ids
        check_prompt(runtime.model, ids, request.context)
        # Memory is free before someone else is let in for it.
        room = held.enter_context(runtime.admission.room(len(ids), request.priority, self._cancelled))
        if turn is None:
            alone = held.enter_context(Alone(runtime.index, runtime.model.config.context))
            receipt = Receipt("", prompt_tokens=len(ids), exact=runtime.exact)
            receipt.explain(Why(Cause.OFF, "nothing was looked up"))
        else:
            alone = None
            held.enter_context(closing(turn.kv))
            receipt = turn.acquire(ids, prompt.diverged_at_char)
        receipt.rules = request.rules
        self.receipt = receipt
        constraint = request.constraint() if request.constraint is not None else None
        sampler = Sampler(request.sampling, ids, runtime.model.config.vocab_size, runtime.rows, constraint)
        output = Output(request, runtime.tokenizer, ids, self._continues(ids), queue, stopped)
        owner = turn or alone
        assert owner is not None
        drafts = runtime.drafts
        drafting = drafts is not None or request.drafter is not None
        proposer = Proposer(sampler, request.drafter) if drafting else None
        most_tokens = min(len(ids) + request.max_tokens, request.context)
        sequence = Sequence(owner, room, list(ids), sampler, output, proposer, most_tokens)
        self._sequence = sequence  # from now on `cancel` reaches it
        if self._cancelled.is_set():
            raise CancelledError("cancelled")
        runtime.engine.submit(sequence)
        if drafts is not None and proposer is not None and request.drafter is None:
            # Only now: the prompt is being computed meanwhile.
            greedy, tenant = request.sampling.temperature == 0, None if turn is None else turn.tenant
            with suppress(MemoryError):  # then there are no drafts
                proposer.lookup = drafts.lookup(ids, request.context, tenant, greedy=greedy)
        return _Computation(turn, prompt, receipt, sampler, output, sequence)

    def _open_turn(self, held: ExitStack, store: AgentStore) -> Turn:
        request, context = self._request, self._runtime.model.config.context
        parent = request.point.parent if request.point is not None else None
        turn = store.open_turn(request.agent, context, request.tenant, self._cancelled, request.group, parent)
        return held.enter_context(turn)

    def _finish(self, computation: _Computation, stopped: Stopped) -> End:
        """The engine has let go of the sequence: commit the turn."""
        request, output, receipt = self._request, computation.output, computation.receipt
        self._runtime.weights.optimize()  # a good moment to reconsider which weights are kept
        if stopped.error is not None:
            raise stopped.error
        if self._cancelled.is_set():
            raise CancelledError("cancelled")
        if output.answer.calls:
            receipt.tool_format = output.answer.calls[0].format or None
        sequence = computation.sequence
        receipt.passes = sequence.passes
        receipt.drafted_tokens, receipt.accepted_tokens = sequence.drafted, sequence.accepted
        usage = Usage(
            receipt.prompt_tokens, receipt.cached_tokens, len(output.tokens), output.reasoning_tokens,
            sequence.drafted, sequence.accepted,
        )  # fmt: skip
        if computation.turn is not None and request.keep:
            if self._runtime.drafts is not None:
                self._runtime.drafts.remember(computation.turn.tenant, sequence.tokens)
            self._commit(computation.turn, computation.prompt, output, usage)
        return End(receipt, output.finish_reason, usage, output.stop, computation.sampler.spent_s, request.choice)

    def _commit(self, turn: Turn, prompt: Prompt, output: Output, usage: Usage) -> None:
        tokenizer, messages, point = self._runtime.tokenizer, self._request.messages, self._request.point
        runs = prompt.runs or (Run(tokenizer.decode(prompt.ids, special=True), False, len(prompt.ids)),)
        spelt = answer_runs(tokenizer, output.tokens, continuing=self._continues(prompt.ids))
        record = None if point is None else point.record(output.answer, output.finish_reason, usage)
        said = None if messages is None else with_answer(messages, output.answer.message())
        answers: tuple[AnswerPlace, ...] = ()
        if self._request.reader is not None:
            answers = answer_places(turn.history.answers, prompt.kept_runs, runs)
        turn.commit((*runs, *spelt), said, final=point is not None, record=record, answers=answers)
        if self._ahead is not None and self._request.next_prompt is not None and self._request.reader is not None:
            next_prompt, message = self._request.next_prompt, output.answer.message()
            job = Job(turn.tenant, turn.receipt.agent, lambda: next_prompt(message), self._request.reader)
            self._ahead.offer(self._runtime, job)

    def _continues(self, ids: list[int]) -> bool:
        """After a control token a text begins, else it goes on: only then is a leading space part of it."""
        return ids[-1] not in self._runtime.control_ids

    def _tokenise_alone(self) -> Prompt:
        prompt, context = self._request.prompt, self._request.context
        if isinstance(prompt, list):
            return Prompt(prompt, ())
        segments, add_bos = prompt
        with self._tokenising(segments) as long:
            ids = self._runtime.tokenizer.encode(segments, add_bos=add_bos, most=context if long else None)
        _check_length(ids, context, long)
        return Prompt(ids, ())

    def _tokenise(self, turn: Turn) -> Prompt:
        """Now that the agent's turn is owned: what it has computed keeps its token ids."""
        prompt, context = self._request.prompt, self._request.context
        if self._prompt_of is not None and self._prompt_of._ids is not None:
            prompt = self._prompt_of._ids
        if isinstance(prompt, list):
            return Prompt(prompt, ())  # what they spell is worked out after the last token
        segments, add_bos = prompt
        with self._tokenising(segments) as long:
            wanted = self._replay(turn, wanted_runs(segments, add_bos))
            history, most = turn.history, context if long else None
            tokenised = tokenise(self._runtime.tokenizer, wanted, history.runs, history.ids, most)
        _check_length(tokenised.ids, context, long)
        return tokenised

    def _replay(self, turn: Turn, wanted: list[Segment]) -> list[Segment]:
        """The prompt with past answers as they were sampled. A conversation without a name finds the one that it goes
        on from.
        """
        request, tokenizer = self._request, self._runtime.tokenizer
        if turn.agent is None and request.keep:
            turn.continue_branch(text_digests(wanted))
        if request.reader is None or not turn.may_know_answers or goes_on(turn.history.runs, wanted):
            return wanted
        if has_odd_calls(request.messages or ()):
            return wanted
        found = replay(wanted, tokenizer.end_texts, turn.answers_behind, request.reader)
        turn.receipt.replayed_answers = found.respelt
        if turn.agent is None and found.last is not None:
            if request.keep:
                turn.continue_branch(text_digests(found.runs))
            if turn.agent is None:
                turn.branch_off(found.last)
        return found.runs

    @contextmanager
    def _tokenising(self, segments: list[Segment]) -> Iterator[bool]:
        """Long texts one at a time: Python threads that compute hold up all others. Yields whether it is a long one."""
        if sum(len(segment.text) for segment in segments) < LONG_TEXT:
            yield False
            return
        if not self._runtime.long_texts.enter(None, cancelled=self._cancelled):
            raise CancelledError("cancelled while other long texts were tokenised")
        try:
            yield True
        finally:
            self._runtime.long_texts.leave(None)


def _check_length(ids: list[int], context: int, long: bool) -> None:
    """A long prompt is tokenised no further than the context: how many tokens it has is not known."""
    if long and len(ids) > context:
        raise too_long(f"more than {context:,}", context)

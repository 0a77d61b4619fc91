"""One request from prompt to end: the agent's turn, room in memory, the engine, text as it comes, the commit.

It runs in the thread of whoever iterates; only sampling, detokenising and the search for stop strings happen on the
engine's thread, so that a sequence ends with the very token that ended it. A listener is told of tokens there, too: no
thread has to be woken for each.

An iterator that is not read to its end may be closed by the garbage collector, on any thread and with any lock held. So
closing it only says so to the engine; turn and memory are given back where the sequence ends.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from everwarm.engine.admission import Room
from everwarm.engine.engine import Engine
from everwarm.engine.prefill import check_prompt, too_long
from everwarm.engine.processors import Constraint
from everwarm.engine.sampler import Choice, Sampler
from everwarm.engine.sampling import Sampling
from everwarm.engine.sequence import Sequence
from everwarm.errors import CancelledError
from everwarm.kv.manifest import text_digests
from everwarm.kv.receipt import Cause, Receipt, Why
from everwarm.kv.turn import Alone, Turn
from everwarm.text.detokenizer import Detokenizer
from everwarm.text.history import Prompt, answer_runs, tokenise, wanted_runs
from everwarm.text.stop import StopMatcher
from everwarm.types import Run, Segment
from everwarm.waiting import Cancellation

if TYPE_CHECKING:
    from everwarm.llm import LLM

Message = Mapping[str, Any]
Drafter = Callable[[list[int]], list[int]]
"""Given the tokens so far, proposes some that may come next; on the engine's thread, so it must be quick."""


@dataclass(frozen=True, slots=True)
class Event:
    """One generated token. `text` holds whole characters only, so it may be empty or belong to earlier tokens too."""

    token: int
    text: str
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...]
    finish_reason: str | None  # on the last event: `stop` (end token or stop string) or `length`
    stop: str | None = None  # the stop string that ended the answer, if one did


@dataclass(frozen=True, slots=True)
class End:
    """After the last event: what was reused, and whether the turn is safe on disk."""

    receipt: Receipt
    text: str = ""  # so that who only prints need not tell it from an event


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request."""

    given: list[int] | tuple[list[Segment], bool]  # token ids, or segments and whether BOS goes before them
    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...]
    end_ids: frozenset[int]
    agent: str | None = None
    tenant: str = ""
    group: str = ""
    messages: tuple[Message, ...] | None = None
    cache: bool = True  # False: nothing is looked up, nothing is kept
    keep: bool = True  # False: what is known is used, but the answer is not kept
    priority: int = 0
    context: int = 0
    constraint: Callable[[], Constraint] | None = None  # makes one: it has the state of one choice
    drafter: Drafter | None = None


class Generation:
    """Iterate over `events` once; `cancel` from anywhere."""

    def __init__(self, llm: "LLM", asked: Asked) -> None:
        self._llm = llm
        self._asked = asked
        self._cancelled = Cancellation()
        self._sequence: Sequence | None = None
        self._engine: Engine | None = None  # once the sequence was submitted
        self._happened: SimpleQueue[Event | _Over] = SimpleQueue()
        self.receipt: Receipt | None = None  # once the prefix was looked up
        self._ids: list[int] | None = None  # of the prompt, once it is tokenised
        self._first: Generation | None = None
        self._answer: list[int] = []
        self._text: list[str] = []
        self._listener: Callable[[Event], None] = self._happened.put
        self._ended = False  # the engine has let go of the sequence
        self._abandoned: list[ExitStack] = []  # what an iterator that was closed early has left to be given back

    def cancel(self) -> None:
        """The iterator raises CancelledError, soon; memory is free at the next step of the engine."""
        self._cancelled.set()
        if self._sequence is not None and self._engine is not None:
            self._engine.cancel(self._sequence)

    def another_choice(self, seed: int | None) -> "Generation":
        """Another answer to the same prompt, which is not kept. It goes on from the very tokens of this one, which must
        have begun: those depend on what its agent remembers.
        """
        sampling = replace(self._asked.sampling, seed=seed)
        other = Generation(self._llm, replace(self._asked, sampling=sampling, agent=None, group="", keep=False))
        other._first = self
        return other

    def events(self, listener: Callable[[Event], None] | None = None) -> Iterator[Event | End]:
        """An event per token, then the end. With a `listener`, which must not wait, the tokens go there instead, from
        the engine's thread.
        """
        self._listener = listener or self._listener
        return self._alone() if not self._asked.cache else self._turn()

    def _alone(self) -> Iterator[Event | End]:
        llm, ids = self._llm, self._tokenise_alone()
        check_prompt(llm.model, ids, self._asked.context)
        exact = llm.backend.exact
        receipt = self.receipt = Receipt("", prompt_tokens=len(ids), exact=exact)
        receipt.explain(Why(Cause.OFF, "nothing was looked up"))
        with self._held() as held:
            room = held.enter_context(llm.room(len(ids), self._asked.priority, self._cancelled))
            yield from self._compute(held.enter_context(llm.new_turn()), room, ids)
        yield End(receipt)

    def _turn(self) -> Iterator[Event | End]:
        llm, asked = self._llm, self._asked
        store = llm.agents
        with self._held() as held:
            turn = held.enter_context(
                store.open_turn(asked.agent, llm.config.context, asked.tenant, self._cancelled, asked.group)
            )
            prompt = self._tokenise(turn)
            self._ids = prompt.ids
            check_prompt(llm.model, prompt.ids, asked.context)
            # Memory is free before someone else is let in for it.
            room = held.enter_context(llm.room(len(prompt.ids), asked.priority, self._cancelled))
            held.enter_context(closing(turn.kv))
            receipt = self.receipt = turn.acquire(prompt.ids, prompt.diverged_at_char)
            yield from self._compute(turn, room, prompt.ids)
            answer = {"role": "assistant", "content": "".join(self._text)}
            said = None if asked.messages is None else (*asked.messages, answer)
            spelt = answer_runs(llm.tokenizer, self._answer, continuing=prompt.ids[-1] not in llm.control_ids)
            if asked.keep:
                runs = prompt.runs or (Run(llm.tokenizer.decode(prompt.ids, special=True), False, len(prompt.ids)),)
                turn.commit((*runs, *spelt), said)
        yield End(receipt)

    @contextmanager
    def _held(self) -> Iterator[ExitStack]:
        """What has to be given back at the end; by the engine if the iterator is closed before."""
        held = ExitStack()
        try:
            yield held
        except GeneratorExit:
            self._abandoned.append(held)
            assert self._engine is not None
            self._engine.call_soon(self._give_back)
            raise
        except BaseException:
            held.close()
            raise
        held.close()

    def _give_back(self) -> None:
        """The iterator was closed early. On the engine's thread, or where the sequence has ended."""
        self.cancel()
        if self._ended:
            with suppress(IndexError):  # once
                self._abandoned.pop().close()

    def _tokenise_alone(self) -> list[int]:
        given, context = self._asked.given, self._asked.context
        if isinstance(given, list):
            return given
        with self._llm.tokenising(given[0], self._cancelled) as long:
            ids = self._llm.tokenizer.encode(given[0], add_bos=given[1], most=context if long else None)
        _check_length(ids, context, long)
        return ids

    def _tokenise(self, turn: Turn) -> Prompt:
        """Now that the agent's turn is owned: what it has computed keeps its token ids."""
        given, tokenizer = self._asked.given, self._llm.tokenizer
        if self._first is not None and self._first._ids is not None:
            given = self._first._ids
        if isinstance(given, list):
            return Prompt(given, ())  # what they spell is worked out after the last token
        segments, add_bos = given
        context = self._asked.context
        with self._llm.tokenising(segments, self._cancelled) as long:
            if turn.agent is None and self._asked.keep:
                turn.continue_branch(text_digests(wanted_runs(segments, add_bos)))
            history = turn.history
            prompt = tokenise(tokenizer, segments, add_bos, history.runs, history.ids, context if long else None)
        _check_length(prompt.ids, context, long)
        return prompt

    def _compute(self, turn: Turn | Alone, room: Room, ids: list[int]) -> Generator[Event]:
        llm = self._llm
        constraint = self._asked.constraint() if self._asked.constraint is not None else None
        sampler = Sampler(self._asked.sampling, ids, llm.config.vocab_size, llm.backend.rows, constraint)
        tell = self._teller(ids)
        sequence = self._sequence = Sequence(turn, room, list(ids), sampler, tell, self._end)
        if (drafter := self._asked.drafter) is not None:
            sequence.propose = lambda: drafter(sequence.tokens)
        engine = self._engine = llm.engine
        if self._cancelled.is_set():
            raise CancelledError("cancelled")
        engine.submit(sequence)
        over = None
        while over is None:
            happened = self._happened.get()
            if isinstance(happened, _Over):
                over = happened
            else:
                yield happened
        llm.finished(sampler)
        if over.error is not None:
            raise over.error
        if self._cancelled.is_set():
            raise CancelledError("cancelled")

    def _end(self, error: BaseException | None) -> None:
        """The engine has let go of the sequence."""
        self._ended = True
        self._happened.put(_Over(error))
        if self._abandoned:
            self._give_back()

    def _teller(self, ids: list[int]) -> Callable[[Choice], bool]:
        """What becomes of a token: text, unless it ends the answer."""
        asked, llm = self._asked, self._llm
        limit = min(asked.max_tokens, asked.context - len(ids))
        # After a control token a text begins, else it goes on: only then is a leading space part of it.
        detokenizer = Detokenizer(llm.tokenizer, continuing=ids[-1] not in llm.control_ids)
        matcher = StopMatcher(asked.stops)
        count = 0

        def tell(choice: Choice) -> bool:
            nonlocal count
            count += 1
            text = matcher.push(detokenizer.push(choice.token))
            finish = None
            if choice.token in asked.end_ids or matcher.matched is not None:
                finish = "stop"
            elif count == limit:
                finish = "length"
            if finish and matcher.matched is None:
                text += matcher.push(detokenizer.flush()) + matcher.flush()
            self._answer.append(choice.token)
            self._text.append(text)
            self._listener(Event(choice.token, text, choice.logprob, choice.top_logprobs, finish, matcher.matched))
            return finish is not None

        return tell


def _check_length(ids: list[int], context: int, long: bool) -> None:
    """A long prompt is tokenised no further than the context: how many tokens it has is not known."""
    if long and len(ids) > context:
        raise too_long(f"more than {context:,}", context)


@dataclass(frozen=True, slots=True)
class _Over:
    """The engine has let go of the sequence."""

    error: BaseException | None

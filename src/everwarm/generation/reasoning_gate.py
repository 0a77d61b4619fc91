"""A constraint for answers that begin with reasoning: it bounds the reasoning, and lets the answer's own constraint
begin where the answer begins.

While the model reasons, every token may follow. When the budget is spent, the model is made to write the end of
reasoning, token by token, and goes on from there by itself.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from everwarm.engine.processors import Bitmask, Constraint
from everwarm.text.reasoning import ReasoningFormat
from everwarm.text.tokenizer import Tokenizer


class Phase(IntEnum):
    """Where an answer is."""

    BEFORE = 0  # it may begin to reason
    REASONING = 1
    ENDING = 2  # the end of reasoning is being written for it
    ANSWER = 3


class _State(NamedTuple):
    """After some tokens."""

    phase: Phase
    tail: bytes = b""  # the last of what was said, long enough for a mark
    tokens: int = 0  # how many: of the reasoning, of its forced end, or of the mark that begins it


class ReasoningGate:
    """A `Constraint` of one choice."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        form: ReasoningFormat,
        *,
        inside: bool,
        budget: int | None = None,
        answer: Constraint | None = None,
    ) -> None:
        """`inside`: the prompt has opened reasoning. `budget` is the number of tokens of reasoning, at most; without
        one it ends when it ends. `answer` is what may follow it.
        """
        self._tokenizer = tokenizer
        self._begin, self._end = form.begin.encode(), form.end.encode()
        self._begin_ids = tokenizer.encode(form.begin, special=True)
        self._forced = tokenizer.encode(form.forced_end, special=True, continuing=True)
        self._budget, self._answer = budget, answer
        self._states = [self._reasoning(0) if inside else _State(Phase.BEFORE)]

    def mask(self) -> Bitmask | None:
        state = self._states[-1]
        match state.phase:
            case Phase.ENDING:
                return self._only(self._forced[state.tokens])
            case Phase.ANSWER:
                return None if self._answer is None else self._answer.mask()
            case Phase.BEFORE if self._answer is not None:
                if state.tokens:  # the mark has begun
                    return self._only(self._begin_ids[state.tokens])
                allowed = self._answer.mask()
                return None if allowed is None else allowed | self._only(self._begin_ids[0])
        return None

    def advance(self, token: int) -> None:
        state = self._states[-1]
        following = self._after(state, token)
        begins_answer = state.phase is Phase.BEFORE and following.phase is Phase.ANSWER
        if self._answer is not None and (state.phase is Phase.ANSWER or begins_answer):
            self._answer.advance(token)
        self._states.append(following)

    def rollback(self, count: int) -> None:
        for _ in range(count):
            following, state = self._states.pop(), self._states[-1]
            begins_answer = state.phase is Phase.BEFORE and following.phase is Phase.ANSWER
            if self._answer is not None and (state.phase is Phase.ANSWER or begins_answer):
                self._answer.rollback(1)

    def _after(self, state: _State, token: int) -> _State:
        if state.phase is Phase.ANSWER:
            return state
        if state.phase is Phase.ENDING:
            over = state.tokens + 1 == len(self._forced)
            return _State(Phase.ANSWER) if over else state._replace(tokens=state.tokens + 1)
        longest = len(self._begin) + len(self._end) + 64
        tail = (state.tail + self._tokenizer.token_bytes(token, special=True))[-longest:]
        if state.phase is Phase.REASONING:
            return _State(Phase.ANSWER) if self._end in tail else self._reasoning(state.tokens + 1, tail)
        said = tail.lstrip()
        if said.startswith(self._begin):
            return self._reasoning(0)
        if self._begin.startswith(said) and (self._answer is None or token == self._begin_ids[state.tokens]):
            return _State(Phase.BEFORE, tail, state.tokens + 1)
        return _State(Phase.ANSWER)

    def _reasoning(self, count: int, tail: bytes = b"") -> _State:
        spent = self._budget is not None and count >= self._budget
        return _State(Phase.ENDING) if spent else _State(Phase.REASONING, tail, count)

    def _only(self, token: int) -> Bitmask:
        allowed = np.zeros((self._tokenizer.vocab_size + 31) // 32, np.uint32)
        allowed[token // 32] = 1 << token % 32
        return allowed

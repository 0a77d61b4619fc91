"""What we ask of llguidance: a tokenizer made of a model's tokens, and a matcher that follows a grammar.

As a program it compiles grammars that are sent to its standard input, so that one that takes too long, or too much
memory, ends this process and not the server (`trial`).
"""

import pickle
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import BinaryIO

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

TRIAL_CPU_S = 3
"""Seconds of processor time that a grammar may take to compile."""
TRIAL_BYTES = 2 << 30
"""Memory of the process that tries grammars."""
IDLE_S = 300
"""After so many seconds without work that process ends."""
HEADER = struct.Struct("<Q")

LIMITS = LLParserLimits(
    step_lexer_fuel=100_000,  # about 7 ms for one mask at most: everyone who decodes waits for it
    step_max_items=20_000,  # about 1 ms
    max_lexer_states=50_000,  # up to 2 KB each
    verbose_errors=False,
)

OPTIONS = '\n%llguidance {"no_forcing": true}\n'
"""Behind every grammar. Where a grammar leaves one continuation of bytes, llguidance would tokenise it by itself and
allow only that: another way to spell the same bytes may be likelier for the model.
"""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """The tokens of a vocabulary by id, as bytes."""

    tokens: Sequence[bytes]  # of a control token its name; empty: never generated
    control_ids: Sequence[int]  # allowed only where a grammar names them
    end_ids: Sequence[int]  # allowed where an answer may end


class _Wrapper:
    """What `LLTokenizer` reads its tokens from."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable) -> None:
        self.tokens = table.tokens
        self.special_token_ids = table.control_ids
        self.eos_token_id = table.end_ids[0]

    def __call__(self, text: str | bytes) -> list[int]:
        """Nothing is tokenised ahead (`OPTIONS`). llguidance calls this once, to see what it gets."""
        return []


def new_tokenizer(table: TokenTable) -> LLTokenizer:
    return LLTokenizer(_Wrapper(table), n_vocab=len(table.tokens), eos_token=list(table.end_ids))  # type: ignore[arg-type]


def new_matcher(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher before the first token, with its first mask computed. Ask it for its error."""
    matcher = LLMatcher(tokenizer, grammar + OPTIONS, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Compile what comes, one grammar after the other; the answer is what is wrong with it, or nothing."""
    table: TokenTable = pickle.loads(_read(requests))  # noqa: S301 - from the process that has started this one
    tokenizer = new_tokenizer(table)
    resource.setrlimit(resource.RLIMIT_DATA, (TRIAL_BYTES, TRIAL_BYTES))
    while message := _read(requests):
        signal.alarm(0)
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(used.ru_utime + used.ru_stime) + 1 + TRIAL_CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.RLIM_INFINITY))
        error = new_matcher(tokenizer, message.decode()).get_error().encode()
        answers.write(HEADER.pack(len(error)) + error)
        answers.flush()
        signal.alarm(IDLE_S)


def _read(stream: BinaryIO) -> bytes:
    header = stream.read(HEADER.size)
    return stream.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else b""


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)

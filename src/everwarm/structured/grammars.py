"""Compiled grammars of one model: each is compiled once and kept while it is used.

What is compiled is tried in a process of its own first (`trial`), unless it is known to be quick. Both what can be
compiled and what was refused is remembered, up to a number of grammars and of bytes.
"""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Protocol

from llguidance import LLMatcher, LLTokenizer

from everwarm.errors import RequestError
from everwarm.structured.constraint import GrammarConstraint
from everwarm.structured.grammar import Grammar
from everwarm.structured.matching import TokenTable, new_matcher, new_tokenizer
from everwarm.structured.trial import Trial

MOST_KEPT = 64
MOST_KEPT_BYTES = 4 << 20
"""Of the texts of grammars that are kept."""


class Vocabulary(Protocol):
    """What a tokenizer tells of its tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eog_ids(self) -> Collection[int]: ...

    @property
    def special_tokens(self) -> Mapping[str, int]: ...

    def token_bytes(self, id_: int, *, special: bool = False) -> bytes: ...


def token_table(vocabulary: Vocabulary) -> TokenTable:
    """A vocabulary as llguidance takes it."""
    control = frozenset(vocabulary.special_tokens.values())
    ends = sorted(vocabulary.eog_ids)
    if not ends:
        raise RequestError("this model's vocabulary has no end token: an answer that follows a grammar could not end")
    tokens = [vocabulary.token_bytes(id_, special=True) for id_ in range(vocabulary.vocab_size)]
    return TokenTable(tokens, sorted(control | set(ends)), ends)


class Grammars:
    """Use it from any thread. `close` ends the process that tries grammars, if there is one."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._trial = Trial(lambda: self._table)
        self._lock = threading.Lock()
        self._building = threading.Lock()
        self._kept: OrderedDict[str, LLMatcher | str] = OrderedDict()  # by text: a matcher before its first token, or
        self._kept_bytes = 0  # what is wrong with it
        self._end_ids = frozenset(vocabulary.eog_ids)

    def constraint(self, grammar: Grammar) -> Callable[[], GrammarConstraint]:
        """What makes constraints for this grammar. Raises RequestError if it can't be followed."""
        found = self._look_up(grammar.text)
        if found is None:
            found = self._compile(grammar)
            self._keep(grammar.text, found)
        if isinstance(found, str):
            raise RequestError(f"{grammar.name}: {found}")
        matcher = found

        def make() -> GrammarConstraint:
            with self._lock:
                own = matcher.deep_copy()
            return GrammarConstraint(own, self._vocabulary.vocab_size, self._end_ids, grammar.name)

        return make

    def close(self) -> None:
        self._trial.close()

    def _compile(self, grammar: Grammar) -> LLMatcher | str:
        tokenizer = self._tokenizer
        if not grammar.quick:
            error = self._trial.error_of(grammar.text)
            if error:
                return told(error)
        matcher = new_matcher(tokenizer, grammar.text)
        return told(matcher.get_error()) if matcher.is_error() else matcher

    def _look_up(self, text: str) -> LLMatcher | str | None:
        with self._lock:
            if text in self._kept:
                self._kept.move_to_end(text)
            return self._kept.get(text)

    def _keep(self, text: str, compiled: LLMatcher | str) -> None:
        with self._lock:
            if text in self._kept:
                return
            self._kept[text] = compiled
            self._kept_bytes += len(text)
            while len(self._kept) > MOST_KEPT or self._kept_bytes > MOST_KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popitem(last=False)[0])

    @cached_property
    def _table(self) -> TokenTable:
        return token_table(self._vocabulary)

    @property
    def _tokenizer(self) -> LLTokenizer:
        with self._building:
            return self._built_tokenizer

    @cached_property
    def _built_tokenizer(self) -> LLTokenizer:
        return new_tokenizer(self._table)


def told(error: str) -> str:
    """llguidance's message, for people: one line, without the position in a text that they have not written."""
    if "regex parse error" in error and "error: " in error:
        return "not a regular expression: " + error.rpartition("error: ")[2].split("\n", 1)[0][:200]
    line = error.split("\n", 1)[0]
    for before in ("failed to compile JSON schema: ", "(in regex): "):
        line = line.rpartition(before)[2]
    if line.startswith("Unimplemented keys: "):
        names = line.removeprefix("Unimplemented keys: ").strip("[]").replace('"', "")
        return f"{names}: not supported in a schema; leave it out"
    if line.startswith("oneOf constraints"):
        return "oneOf: supported only where its schemas exclude each other; use anyOf"
    if found := re.match(r"Resource '(.*?)' is not present", line):
        return f"$ref {found[1][:100]}: only references inside the schema are supported"
    return line[:300]

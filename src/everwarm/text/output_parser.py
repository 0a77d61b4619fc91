"""From the text of an answer to its content: where text, reasoning and tool calls are told apart.

A parser belongs to one choice. It runs on the engine's thread, after the detokenizer and the search for stop strings,
and must be quick. It loses nothing: what looks like a call and turns out to be none comes back as text.
"""

from collections.abc import Sequence
from typing import Protocol

from everwarm.events import Content, Text


class OutputParser(Protocol):
    """Reads the answer of one choice, piece by piece, however it is cut."""

    @property
    def control_tokens(self) -> frozenset[str]:
        """Names of the control tokens that it reads. All others are left out of the answer."""

    def feed(self, text: str) -> Sequence[Content]:
        """The next piece of text, never empty; what is certain now. No text is ever the name of a control token."""

    def control(self, name: str) -> Sequence[Content]:
        """One of `control_tokens` was generated. All text before it has been fed. It may be the end token."""

    def finish(self) -> Sequence[Content]:
        """The answer is over; what was held back."""


class PlainText:
    """Everything is text."""

    control_tokens: frozenset[str] = frozenset()

    def feed(self, text: str) -> Sequence[Content]:
        return (Text(text),)

    def control(self, name: str) -> Sequence[Content]:
        return ()

    def finish(self) -> Sequence[Content]:
        return ()

"""Data that passes between layers. Imports nothing of ours but errors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MetadataScalar = bool | int | float | str
MetadataValue = MetadataScalar | Sequence["MetadataValue"]
Metadata = Mapping[str, MetadataValue]
"""What a GGUF file says about itself. Arrays are lazy sequences: nothing is decoded until an item is asked for."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of text. In a special one the whole text is the name of one control token; in any other, nothing is."""

    text: str
    special: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A segment that has been tokenised: so many of the history's tokens spell it."""

    text: str
    special: bool
    tokens: int


@dataclass(frozen=True, slots=True)
class AnswerPlace:
    """Where in a history an answer begins."""

    digest: str  # of the text of all runs before the one in which it begins
    run: int  # the number of that run, neighbouring texts being one
    lead: int  # characters of that run that are the prompt's

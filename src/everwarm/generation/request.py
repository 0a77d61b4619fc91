"""What is asked of a generation, checked."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from everwarm.engine.drafts.proposer import Drafter
from everwarm.engine.processors import Constraint
from everwarm.engine.sampling import Sampling
from everwarm.events import Answer, FinishReason, Usage
from everwarm.generation.replay import Reader
from everwarm.text.output_parser import OutputParser, PlainText
from everwarm.types import Segment

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Point:
    """The answer becomes a point of a history under the agent's name: it never changes, others may go on from it."""

    parent: str | None  # the point that this one goes on from
    record: Callable[[Answer, FinishReason, Usage], Mapping[str, Any]]  # makes what is kept with it, as JSON


@dataclass(frozen=True, slots=True)
class Request:
    """One choice."""

    prompt: list[int] | tuple[list[Segment], bool]  # token ids, or segments and whether BOS goes before them
    sampling: Sampling
    max_tokens: int
    stops: tuple[str, ...]
    end_ids: frozenset[int]
    context: int  # tokens of prompt and answer together, at most
    agent: str | None = None
    tenant: str = ""
    group: str = ""
    messages: tuple[Message, ...] | None = None
    keep: bool = True  # False: what is known is used, but the answer is not kept
    priority: int = 0
    constraint: Callable[[], Constraint] | None = None  # makes one: it has the state of one choice
    drafter: Drafter | None = None
    parser: Callable[[], OutputParser] = PlainText  # makes one: it has the state of one choice
    reader: Reader | None = None  # how answers in a prompt of messages are read; None: none are looked for
    next_prompt: Callable[[Message], tuple[list[Segment], bool] | None] | None = None
    """How the next prompt will begin if the answer is this message: what is certain of it, and whether with BOS."""
    most_calls: int | None = None  # the answer ends with so many tool calls
    point: Point | None = None
    rules: tuple[str, ...] = ()  # those that have changed the prompt
    choice: int = 0

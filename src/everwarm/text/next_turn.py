"""What can be foreseen of the next turn: how its prompt begins, whatever will be said in it."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from everwarm.types import Segment

Message = Mapping[str, Any]

_WORDS = ("a", "b")
"""Two things that might be said: what both prompts begin with does not depend on it."""


def next_conversations(messages: Sequence[Message], answer: Message) -> list[list[Message]]:
    """A conversation that goes on behind an answer, with each of the words: as the results of the answer's calls, or
    said by the user. None if the answer completes a message that the client had begun.
    """
    if messages and messages[-1].get("role") == "assistant":
        return []
    earlier = [message for message in messages if message.get("role") == "assistant"]
    if earlier and not any(message.get("reasoning_content") for message in earlier):
        answer = {key: value for key, value in answer.items() if key != "reasoning_content"}  # nor will it be this time
    return [[*messages, answer, *_said_next(answer, word)] for word in _WORDS]


def _said_next(answer: Message, word: str) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": word}
        for call in answer.get("tool_calls") or ()
    ] or [{"role": "user", "content": word}]


def common_beginning(prompts: Sequence[Sequence[Segment]]) -> list[Segment]:
    """What prompts have in common, up to a control token: a text that goes on may be tokenised in another way."""
    same = [several[0] for several in takewhile(_all_equal, zip(*prompts, strict=False))]
    while same and not same[-1].special:
        same.pop()
    return same


def _all_equal(several: Sequence[Segment]) -> bool:
    return all(one == several[0] for one in several)

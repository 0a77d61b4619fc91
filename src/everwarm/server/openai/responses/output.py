"""An answer as output items of the Responses API.

Ids of items follow from the id of the response and their place in it, so that a stream and what is kept of it agree.
"""

import json
import secrets
from dataclasses import dataclass, field

from everwarm.events import Answer, FinishReason, Reasoning, ToolCall, Usage
from everwarm.server.request import Json
from everwarm.server.seals import Seals
from everwarm.text.tool_calls.json_reader import well_formed


def new_id() -> str:
    """Nobody can guess it."""
    return f"resp_{secrets.token_hex(24)}"


@dataclass(frozen=True, slots=True)
class ItemIds:
    """Ids of the items of one response."""

    response: str
    custom: frozenset[str] = field(default_factory=frozenset)  # tools that take free text
    seals: Seals | None = None  # reasoning is sealed with it, if the client has asked for that

    def of(self, kind: str, number: int) -> str:
        return f"{kind}_{self.response.removeprefix('resp_')}{number:04x}"


def reasoning_item(item_id: str, text: str, status: str = "completed", seals: Seals | None = None) -> Json:
    content = [{"type": "reasoning_text", "text": text}] if text else []
    sealed = {"encrypted_content": seals.seal(text)} if seals is not None and text else {}
    return {"id": item_id, "type": "reasoning", "summary": [], "content": content, "status": status} | sealed


def message_item(item_id: str, text: str | None, status: str = "completed") -> Json:
    content = [] if text is None else [text_part(text)]
    return {"id": item_id, "type": "message", "role": "assistant", "content": content, "status": status}


def text_part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(item_id: str, call: ToolCall, custom: bool, status: str = "completed") -> Json:
    head = {"id": item_id, "call_id": call.id, "name": call.name, "status": status}
    if custom:
        return head | {"type": "custom_tool_call", "input": free_text(call.arguments)}
    return head | {"type": "function_call", "arguments": call.arguments}


def free_text(arguments: str) -> str:
    """What a tool that takes free text is given: the model was told to put it into one field."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    given = value.get("input") if isinstance(value, dict) else None
    return well_formed(given) if isinstance(given, str) else arguments


def output_items(ids: ItemIds, answer: Answer, *, cut_off: bool) -> list[Json]:
    """All items of an answer, in its order. An answer without any content is an empty text."""
    items: list[Json] = []
    for part, text in answer.texts():
        number = len(items)
        if part is Reasoning:
            items.append(reasoning_item(ids.of("rs", number), text, seals=ids.seals))
        elif isinstance(part, ToolCall):
            items.append(call_item(ids.of("fc", number), part, part.name in ids.custom))
        else:
            items.append(message_item(ids.of("msg", number), text))
    if not items:
        items.append(message_item(ids.of("msg", 0), ""))
    if cut_off:
        items[-1]["status"] = "incomplete"
    return items


def usage_json(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def ended(head: Json, finish: FinishReason | None, items: list[Json], usage: Usage) -> Json:
    """The response object when the answer has ended."""
    cut_off = finish == "length"
    return head | {
        "status": "incomplete" if cut_off else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "output": items,
        "usage": usage_json(usage),
    }

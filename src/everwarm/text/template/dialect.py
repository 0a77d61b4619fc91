"""Finds out in which form a template wants its messages, and puts them into it.

In: messages as clients send them (OpenAI's format). Out: the same messages as this template can read them. Templates
differ in three ways that no metadata tells, so each is tried once, with a word that must come out again:

- content as text, as a list of parts (`[{"type": "text", "text": ...}]`), or either;
- arguments of tool calls as an object or as JSON text (clients send text, most templates expect an object);
- content of a message that only calls tools: null, or an empty text.

It also finds out what becomes of tools (`ToolSupport`), and whether ids of calls must be short.

Invariant: content that a template understands is passed as it is; arguments are objects wherever that works.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from everwarm.errors import TemplateError

DEPTH_LIMIT = 64
"""Nesting of messages, tools and documents."""

Message = dict[str, Any]
Try = Callable[[list[Message], list[Any] | None], str | None]
"""Renders messages and tools; None if the template raises."""

_WORD = "Quokka"
_RESULT = "Found"
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look it up",
        "parameters": {"type": "object", "properties": {"term": {"type": "string", "description": "What"}}},
    },
}
_MEDIA = ("image", "audio", "video", "file")

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send reasoning; templates read the first or the second."""


_HALF = re.compile("[\ud800-\udfff]")
_LONG_ID = "call_0123456789abcdef"
_SHORT_ID = "call00001"


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """What a template does with tools. What it leaves out, the model never sees."""

    lists_tools: bool  # it shows the tools that are offered
    writes_calls: bool  # it shows calls of earlier turns
    writes_results: bool  # it shows what tools have answered
    takes_system: bool  # it takes messages of the system


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a template reads messages. Roles that are in neither set get text."""

    takes_text: frozenset[str]
    takes_parts: frozenset[str]
    takes_object_arguments: bool
    takes_null_content: bool
    takes_any_call_id: bool
    tools: ToolSupport

    @classmethod
    def of(cls, attempt: Try) -> "Dialect":
        """Try a template out."""
        user_takes = _forms(attempt, lambda content: [_message("user", content)])
        hello = _message("user", [_part("Hello")] if user_takes == {"parts"} else "Hello")

        arguments = {"term": _WORD}
        as_object = attempt([hello, *_tool_turn(arguments, "")], [_TOOL])
        as_text = attempt([hello, *_tool_turn(json.dumps(arguments), "")], [_TOOL])
        object_arguments = (_says(as_object) and repr(arguments) not in str(as_object)) or not _says(as_text)

        form = arguments if object_arguments else json.dumps(arguments)
        null, empty = (attempt([hello, *_tool_turn(form, content)], [_TOOL]) for content in (None, ""))
        null_content = null is not None and (null == empty or "None" not in null)

        calling = None if null_content else ""
        takes = {
            "user": user_takes,
            "system": _forms(attempt, lambda content: [_message("system", content), hello]),
            "assistant": _forms(attempt, lambda content: [hello, _message("assistant", content), hello]),
            "tool": _forms(attempt, lambda content: [hello, *_tool_turn(form, calling, content)]),
        }
        with_long_id = attempt([hello, *_tool_turn(form, calling, id_=_LONG_ID)], [_TOOL])
        with_short_id = attempt([hello, *_tool_turn(form, calling)], [_TOOL])
        name = _TOOL["function"]["name"]
        shown = attempt([hello], [_TOOL])
        lists = shown is not None and name in shown
        support = ToolSupport(
            lists_tools=lists,
            writes_calls=_says(with_short_id),
            # A template that knows no tools may still write a role of any name: its model has never seen that.
            writes_results=(lists or _says(with_short_id)) and _RESULT in str(with_short_id),
            takes_system=bool(takes["system"]),
        )
        return cls(
            takes_text=frozenset(role for role, forms in takes.items() if forms != {"parts"}),
            takes_parts=frozenset(role for role, forms in takes.items() if "parts" in forms),
            takes_object_arguments=object_arguments,
            takes_null_content=null_content,
            takes_any_call_id=with_long_id is not None or with_short_id is None,
            tools=support,
        )

    def adapt(self, messages: list[Message]) -> list[Message]:
        """The messages in the forms that the template takes; raises TemplateError for what it can't take at all."""
        return [self._adapted(message, f"messages[{number}]") for number, message in enumerate(messages)]

    def _adapted(self, message: Message, where: str) -> Message:
        role = message["role"]
        changed = dict(message)
        reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
        if reasoning is not None:
            changed = {"thinking": reasoning, **changed, "reasoning_content": reasoning}
        content = message.get("content")
        if isinstance(content, list):
            _check_parts(content, where)
            if role not in self.takes_parts:
                changed["content"] = _joined(content, where)
        elif isinstance(content, str) and role not in self.takes_text and role in self.takes_parts:
            changed["content"] = [_part(content)]
        elif content is None and not self.takes_null_content:
            changed["content"] = ""
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            changed["tool_calls"] = [self._adapted_call(call) for call in calls]
        if isinstance(message.get("tool_call_id"), str):
            changed["tool_call_id"] = self._adapted_id(message["tool_call_id"])
        return changed

    def _adapted_id(self, id_: str) -> str:
        """Mistral's templates take nine letters and digits, and clients send histories of other models."""
        if self.takes_any_call_id or (len(id_) == len(_SHORT_ID) and id_.isalnum()):
            return id_
        return hashlib.sha256(id_.encode("utf-8", "surrogatepass")).hexdigest()[: len(_SHORT_ID)]

    def _adapted_call(self, call: Any) -> Any:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(call.get("id"), str):
            call = {**call, "id": self._adapted_id(call["id"])}
        if not isinstance(function, Mapping) or "arguments" not in function:
            return call
        arguments = function["arguments"]
        if self.takes_object_arguments and isinstance(arguments, str):
            arguments = _parsed(arguments)
        elif not self.takes_object_arguments and isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}


def _message(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _tool_turn(arguments: Any, content: Any, result: Any = _RESULT, id_: str = _SHORT_ID) -> list[Message]:
    call = {"id": id_, "type": "function", "function": {"name": "look_up", "arguments": arguments}}
    return [
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": result, "tool_call_id": id_, "name": "look_up"},
    ]


def _says(output: str | None) -> bool:
    return output is not None and _WORD in output


def _forms(attempt: Try, talk: Callable[[Any], list[Message]]) -> set[str]:
    """In which forms the word comes out, and not the part around it as Python or JSON would show it."""
    text, parts = attempt(talk(_WORD), None), attempt(talk([_part(_WORD)]), None)
    shown = any(f"{{{quote}type{quote}:" in str(parts) for quote in "'\"")
    return {name for name, good in (("text", _says(text)), ("parts", _says(parts) and not shown)) if good}


def _check_parts(parts: list[Any], where: str) -> None:
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(part, str) and not isinstance(kind, str):
            raise TemplateError(
                f"{where}.content[{number}]: expected a part with a type, as in {{'type': 'text', 'text': ...}}"
            )
        if kind is not None and any(medium in kind for medium in _MEDIA):
            raise TemplateError(f"{where}.content[{number}]: parts of type {kind!r} can't be read; send text only")
        if kind == "text" and not isinstance(part.get("text"), str):
            raise TemplateError(f"{where}.content[{number}]: a part of type 'text' needs a text")


def _joined(parts: list[Any], where: str) -> str:
    texts = []
    for number, part in enumerate(parts):
        if not isinstance(part, str) and part["type"] != "text":
            raise TemplateError(
                f"{where}.content[{number}]: this model's chat template reads no parts of type {part['type']!r}"
            )
        texts.append(part if isinstance(part, str) else part["text"])
    return "\n".join(texts)


def _parsed(arguments: str) -> Any:
    """What a model wrote as arguments need not be JSON, or may be nested too deep; then the template gets the text.
    Escapes may spell halves of characters, which are no text: tokenizers read U+FFFD there, and so do templates.
    """
    try:
        value = json.loads(arguments)
        if "\\u" in arguments:
            value = json.loads(_HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) and not _too_deep(value) else arguments


def _too_deep(value: Any) -> bool:
    level, depth = [value], 0
    while level and depth < DEPTH_LIMIT:
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level, depth = [item for items in inner for item in items], depth + 1
    return bool(level)

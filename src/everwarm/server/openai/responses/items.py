"""Input items of the Responses API as messages that chat templates read.

An assistant's turn is spread over several items (reasoning, text, calls); templates want it as one message. Items of
kinds that a text model can't use are replaced by a note or left out, and named: a session must not get stuck because
somebody else's model has used them before.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from everwarm.server.errors import ApiError
from everwarm.server.openai.content import ROLES
from everwarm.server.request import Json
from everwarm.server.seals import Seals

TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
OMITTED = {"input_image": "image", "input_file": "file", "input_audio": "audio", "image_url": "image"}
"""Parts of a message that a text model can't read, and what they are called in the note that replaces them."""

_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


@dataclass(slots=True)
class Messages:
    """The messages of an input, and what was left out."""

    messages: list[Json] = field(default_factory=list)
    omitted: dict[str, None] = field(default_factory=dict)  # kinds, in the order in which they were met
    seals: Seals | None = None

    def omit(self, kind: str) -> None:
        self.omitted[kind] = None


def messages_of(items: str | list[Json], seals: Seals | None = None) -> Messages:
    """`seals` opens reasoning that was sealed here. Raises ApiError 400 where an item makes no sense."""
    found = Messages(seals=seals)
    if isinstance(items, str):
        found.messages.append({"role": "user", "content": items})
        return found
    for number, item in enumerate(items):
        _add(found, item, f"input.{number}")
    return found


def _add(found: Messages, item: Json, where: str) -> None:
    kind = item.get("type") or "message"
    if not isinstance(kind, str):
        raise ApiError(400, f"{where}.type: expected a text, found {type(kind).__name__}")
    if kind == "message":
        _add_message(found, item, where)
    elif kind in _CALLS:
        _add_call(found, item, kind, where)
    elif kind in _OUTPUTS:
        call = _string(item.get("call_id"), f"{where}.call_id")
        content = _text(found, item.get("output"), f"{where}.output")
        found.messages.append({"role": "tool", "tool_call_id": call, "content": content})
    elif kind == "reasoning":
        _add_reasoning(found, item, where)
    else:
        found.omit(kind[:50])


def _add_message(found: Messages, item: Json, where: str) -> None:
    role = item.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(400, f"{where}.role: expected one of {', '.join(ROLES)}, found {str(role)[:50]!r}")
    content = _text(found, item.get("content"), f"{where}.content")
    if ROLES[role] != "assistant":
        found.messages.append({"role": ROLES[role], "content": content})
        return
    message = _assistant(found)
    if message.get("tool_calls") or message.get("content"):  # another text of the assistant: a message of its own
        message = {"role": "assistant"}
        found.messages.append(message)
    message["content"] = content


def _add_call(found: Messages, item: Json, kind: str, where: str) -> None:
    name = _string(item.get("name"), f"{where}.name")
    call_id = _string(item.get("call_id") or item.get("id"), f"{where}.call_id")
    arguments: Any = item.get(_CALLS[kind])
    if kind == "custom_tool_call":
        arguments = {"input": arguments if isinstance(arguments, str) else ""}
    message = _assistant(found)
    calls = message.setdefault("tool_calls", [])
    calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
    message.setdefault("content", None)


def _add_reasoning(found: Messages, item: Json, where: str) -> None:
    texts = [
        part["text"]
        for parts in (item.get("content") or [], item.get("summary") or [])
        if isinstance(parts, list)
        for part in parts
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    ]
    if not texts and (sealed := item.get("encrypted_content")) is not None:
        opened = found.seals.open(sealed) if found.seals is not None else None
        if opened is None:  # somebody else's
            found.omit("encrypted reasoning of another model")
        texts = [opened] if opened else []
    if not texts:
        return
    message = {"role": "assistant", "reasoning_content": "\n".join(texts)}
    found.messages.append(message)


def _assistant(found: Messages) -> Json:
    """The message of the assistant that is being put together."""
    if found.messages and found.messages[-1]["role"] == "assistant":
        return found.messages[-1]
    found.messages.append({"role": "assistant"})
    return found.messages[-1]


def _text(found: Messages, content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where}: expected a text or a list of parts, found {type(content).__name__}")
    return "".join(_parts(found, content, where))


def _parts(found: Messages, content: list[Any], where: str) -> Iterator[str]:
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in TEXT_PARTS and isinstance(part.get("text"), str):
            yield part["text"]
        elif kind == "refusal" and isinstance(part.get("refusal"), str):
            yield part["refusal"]
        elif isinstance(kind, str) and kind in OMITTED:
            found.omit(kind)
            yield f"[{OMITTED[kind]} left out: this model reads text only]"
        else:
            raise ApiError(400, f"{where}.{number}: only text is supported, found {str(kind)[:50]!r}")


def _string(value: object, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ApiError(400, f"{where}: expected a text")
    return value


# Tools ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tools:
    """Tools as chat templates read them."""

    offered: list[Json]
    custom: frozenset[str]  # names of those that take free text
    omitted: dict[str, None]  # kinds that nobody here can carry out, in the order in which they were met


def tools_of(tools: list[Json] | None) -> Tools:
    """Functions and custom tools are offered; other kinds (web search, ...) would have to be carried out by a server
    that we are not. Raises ApiError 400.
    """
    offered: list[Json] = []
    custom: set[str] = set()
    omitted: dict[str, None] = {}
    for number, tool in enumerate(tools or ()):
        kind = tool.get("type")
        if kind == "function":
            function = tool.get("function") if isinstance(tool.get("function"), dict) else tool
            assert isinstance(function, dict)
            name = _string(function.get("name"), f"tools.{number}.name")
            described = {
                key: function[key] for key in ("description", "parameters", "strict") if function.get(key) is not None
            }
            offered.append({"type": "function", "function": {"name": name, **described}})
        elif kind == "custom":
            name = _string(tool.get("name"), f"tools.{number}.name")
            custom.add(name)
            offered.append({"type": "function", "function": _as_function(name, tool)})
        else:
            omitted[str(kind)[:50]] = None
    return Tools(offered, frozenset(custom), omitted)


def _as_function(name: str, tool: Json) -> Json:
    """A tool that takes free text, as a function with one text."""
    description = tool.get("description")
    text = {"type": "string", "description": "The whole input of the tool, as it is."}
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    more = {"description": description} if isinstance(description, str) else {}
    return {"name": name, **more, "parameters": parameters}

"""OpenAI's messages as chat templates read them. What can't be read is a 400."""

from collections.abc import Sequence
from typing import Any

from everwarm.server.errors import ApiError
from everwarm.server.request import Json, template_text
from everwarm.text.tool_calls.choice import ToolChoice

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
         "function": "tool"}  # fmt: skip
"""The roles that clients send, and what templates call them."""


def chat_messages(messages: Sequence[Json]) -> list[Json]:
    """Messages with roles that templates know. A result gets the name of the tool that was called: many templates show
    it, few clients send it.
    """
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    out = []
    for number, message in enumerate(messages):
        read = _message(message, f"messages.{number}")
        for call in read.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        if read["role"] == "tool" and not isinstance(read.get("name"), str) and read.get("tool_call_id") in names:
            read["name"] = names[read["tool_call_id"]]
        out.append(read)
    return out


def _message(message: Json, where: str) -> Json:
    """With content that is text or parts of text."""
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(400, f"{where}.role: expected one of {', '.join(ROLES)}, found {str(role)[:50]!r}")
    read = message | {"role": ROLES[role], "content": template_text(message.get("content"), f"{where}.content")}
    for name in ("reasoning_content", "reasoning", "thinking"):
        if name in read and not isinstance(read[name], str) and read.pop(name) is not None:
            raise ApiError(400, f"{where}.{name}: expected a text")
    if read["role"] == "tool" and "tool_call_id" in read and not isinstance(read["tool_call_id"], str):
        raise ApiError(400, f"{where}.tool_call_id: expected a text")
    if role == "assistant":
        _read_calls(read, where)
    return read


def _read_calls(message: Json, where: str) -> None:
    calls, old = message.pop("tool_calls", None), message.pop("function_call", None)
    if calls is None and isinstance(old, dict):  # as before there were tools
        calls = [{"id": "call_0", "type": "function", "function": old}]
    if calls is None or calls == []:
        return
    if not isinstance(calls, list):
        raise ApiError(400, f"{where}.tool_calls: expected a list")
    message["tool_calls"] = [_call(call, number, f"{where}.tool_calls.{number}") for number, call in enumerate(calls)]


def _call(call: Any, number: int, where: str) -> Json:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{where}: expected a function with a name")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict | None):
        raise ApiError(400, f"{where}.function.arguments: expected JSON text, found {type(arguments).__name__}")
    id_ = call.get("id")
    if not isinstance(id_, str | None):
        raise ApiError(400, f"{where}.id: expected a text")
    named = {"name": function["name"], "arguments": arguments or "{}"}
    return {"id": id_ or f"call_{number}", "type": "function", "function": named}


def tool_choice(choice: Any, parallel: bool | None) -> ToolChoice:
    """`tool_choice` and `parallel_tool_calls`."""
    several = parallel is not False
    if choice is None or choice in ("auto", "none", "required"):
        return ToolChoice(choice or "auto", (), several)
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        function = choice.get(choice["type"], choice)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return ToolChoice("required", (function["name"],), several)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        if isinstance(tools, list) and allowed.get("mode") in ("auto", "required"):
            functions = [tool.get("function", tool) for tool in tools if isinstance(tool, dict)]
            names = tuple(str(one["name"]) for one in functions if isinstance(one, dict) and "name" in one)
            return ToolChoice(allowed["mode"], names, several)
    raise ApiError(400, "tool_choice: expected none, auto, required, or the name of a function")

"""Anthropic's messages and tools in the form that chat templates read, which is OpenAI's.

A turn of the user becomes one message for each tool result and one for the text between them. A turn of the assistant
becomes one message with its text, its reasoning and its tool calls. Consecutive turns of one role are joined. Thinking
that another model has written is reasoning as any other; its signature is not looked at.
"""

from collections.abc import Sequence

from everwarm.server.errors import ApiError
from everwarm.server.request import Json, template_text
from everwarm.text.tool_calls.choice import ToolChoice

_OF_ROLE = {
    "system": ("text",),
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
}
"""Which blocks a turn may have, by role."""


def chat_messages(system: str | list[Json] | None, messages: Sequence[Json]) -> list[Json]:
    """Raises ApiError 400 for content that can't be read."""
    out: list[Json] = []
    if system:
        out.append({"role": "system", "content": template_text(system, "system")})
    names: dict[str, str] = {}  # of tools, by the ids of their calls
    for role, blocks in _turns(messages):
        if role == "assistant":
            out.append(_assistant(blocks, names))
        else:
            out += _user(role, blocks, names)
    if out[-1]["role"] == "assistant":
        raise ApiError(
            400, "messages: the last message is the assistant's; an answer that was begun can't be continued"
        )
    return out


def chat_tools(tools: Sequence[Json] | None) -> list[Json] | None:
    """Functions as OpenAI describes them."""
    if tools is None:
        return None
    out = []
    for number, tool in enumerate(tools):
        if tool.get("type") not in (None, "custom"):
            raise ApiError(
                400, f"tools.{number}: only client-defined (custom) tools are supported, found {_shown(tool['type'])}"
            )
        function = {
            "name": tool.get("name"),
            "description": tool.get("description") or "",
            "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
        }
        out.append({"type": "function", "function": function})
    return out


def tool_choice(choice: Json | None) -> ToolChoice:
    """`tool_choice` as all APIs have it."""
    if choice is None:
        return ToolChoice()
    kind, name = choice.get("type"), choice.get("name")
    parallel = not choice.get("disable_parallel_tool_use")
    if kind in ("auto", "none"):
        return ToolChoice(kind, (), parallel)
    if kind == "any":
        return ToolChoice("required", (), parallel)
    if kind == "tool" and isinstance(name, str):
        return ToolChoice("required", (name,), parallel)
    raise ApiError(400, f"tool_choice: expected auto, any, none, or tool with a name, found {_shown(kind)}")


def _turns(messages: Sequence[Json]) -> list[tuple[str, list[tuple[str, Json]]]]:
    """Roles, and blocks with their places in the request."""
    turns: list[tuple[str, list[tuple[str, Json]]]] = []
    for number, message in enumerate(messages):
        where, role, content = f"messages.{number}", message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in _OF_ROLE:
            raise ApiError(400, f"{where}.role: expected one of {', '.join(_OF_ROLE)}, found {_shown(role)}")
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise ApiError(400, f"{where}.content: expected a text or a list of blocks")
        places = [f"{where}.content.{at}" for at in range(len(content))]
        blocks = [(place, _block(block, role, place)) for place, block in zip(places, content, strict=True)]
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(blocks)
        else:
            turns.append((role, blocks))
    return turns


def _block(block: object, role: str, where: str) -> Json:
    if not isinstance(block, dict) or block.get("type") not in _OF_ROLE[role]:
        kind = block.get("type") if isinstance(block, dict) else type(block).__name__
        allowed = " and ".join(_OF_ROLE[role])
        raise ApiError(400, f"{where}: only {allowed} blocks are supported in turns of {role}, found {_shown(kind)}")
    return block


def _assistant(blocks: list[tuple[str, Json]], names: dict[str, str]) -> Json:
    texts = [block for _, block in blocks if block["type"] == "text"]
    calls = []
    for where, block in blocks:
        if block["type"] != "tool_use":
            continue
        id_, name, given = block.get("id"), block.get("name"), block.get("input")
        if not isinstance(id_, str) or not isinstance(name, str) or not isinstance(given, dict):
            raise ApiError(400, f"{where}: a tool_use block needs an id, a name and an input")
        names[id_] = name
        calls.append({"id": id_, "type": "function", "function": {"name": name, "arguments": given}})
    content = template_text(texts, blocks[0][0]) if texts else None if calls else ""
    thoughts = [block["thinking"] for _, block in blocks if isinstance(block.get("thinking"), str)]
    return (
        {"role": "assistant", "content": content}
        | ({"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {})
        | ({"tool_calls": calls} if calls else {})
    )


def _user(role: str, blocks: list[tuple[str, Json]], names: dict[str, str]) -> list[Json]:
    out: list[Json] = []
    texts: list[Json] = []

    def end_text() -> None:
        if texts:
            out.append({"role": role, "content": template_text(texts.copy(), blocks[0][0])})
            texts.clear()

    for where, block in blocks:
        if block["type"] == "text":
            texts.append(block)
            continue
        end_text()
        id_ = block.get("tool_use_id")
        if not isinstance(id_, str) or id_ not in names:
            raise ApiError(400, f"{where}: no tool_use block before it has the id {_shown(id_)}")
        result = template_text(block.get("content"), f"{where}.content") or ""
        failed = {"is_error": True} if block.get("is_error") else {}
        out.append({"role": "tool", "tool_call_id": id_, "name": names[id_], "content": result} | failed)
    end_text()
    return out or [{"role": role, "content": ""}]


def _shown(value: object) -> str:
    return repr(str(value)[:50])

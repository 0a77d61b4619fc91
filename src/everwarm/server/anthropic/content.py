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
    "user": ("text", "tool_result", "image", "document", "search_result", "container_upload"),
    "assistant": (
        "text", "tool_use", "thinking", "redacted_thinking", "server_tool_use", "web_search_tool_result",
        "web_fetch_tool_result", "code_execution_tool_result", "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result", "mcp_tool_use", "mcp_tool_result", "container_upload",
    ),
}  # fmt: skip
"""Which blocks a turn may have, by role."""

_OMITTED = {"image": "image", "document": "document", "search_result": "search result", "container_upload": "file"}
"""Blocks that a model of text can't read, and what they are called in the note that takes their place: histories carry
screenshots, and a conversation must not get stuck because of them."""


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
    return out


def chat_tools(tools: Sequence[Json] | None) -> list[Json] | None:
    """Functions as OpenAI describes them."""
    if tools is None:
        return None
    out = []
    for tool in tools:
        if tool.get("type") not in (None, "custom"):  # carried out by Anthropic's servers: nobody here can
            continue
        function = {
            "name": tool.get("name"),
            "description": tool.get("description") or "",
            "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
        }
        if tool.get("strict"):
            function["strict"] = True
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
        if block["type"] == "text" or block["type"] in _OMITTED:
            texts += readable([block])  # type: ignore[arg-type]
            continue
        end_text()
        id_ = block.get("tool_use_id")
        if not isinstance(id_, str) or id_ not in names:
            raise ApiError(400, f"{where}: no tool_use block before it has the id {_shown(id_)}")
        result = template_text(readable(block.get("content")), f"{where}.content") or ""
        failed = {"is_error": True} if block.get("is_error") else {}
        out.append({"role": "tool", "tool_call_id": id_, "name": names[id_], "content": result} | failed)
    end_text()
    return out or [{"role": role, "content": ""}]


def readable(content: object) -> object:
    """Blocks of a message, those that a model of text can't read replaced by their text or a note."""
    if not isinstance(content, list):
        return content
    return [_readable(block) if isinstance(block, dict) else block for block in content]


def _readable(block: Json) -> Json:
    kind = block.get("type")
    if not isinstance(kind, str) or kind not in _OMITTED:
        return block
    source = block.get("source")
    title = f"{block['title'][:200]}:\n" if isinstance(block.get("title"), str) else ""
    if isinstance(source, dict) and source.get("type") == "text" and isinstance(source.get("data"), str):
        return {"type": "text", "text": f"{title}{source['data']}"}
    inner = (
        block.get("content") if kind == "search_result" else source.get("content") if isinstance(source, dict) else None
    )
    if isinstance(inner, str):
        return {"type": "text", "text": f"{title}{inner}"}
    if isinstance(inner, list):
        texts = [part["text"] for part in inner if isinstance(part, dict) and isinstance(part.get("text"), str)]
        return {"type": "text", "text": title + "\n".join(texts)}
    return {"type": "text", "text": f"[{_OMITTED[kind]} left out: this model reads text only]"}


def _shown(value: object) -> str:
    return repr(str(value)[:50])

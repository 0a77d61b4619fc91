"""What the requests of all APIs share: the `everwarm` extension, headers, messages and tools as chat templates read
them.
"""

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from everwarm.server.errors import ApiError
from everwarm.server.keys import CALLER
from everwarm.text.tool_calls.choice import ToolChoice

Json = dict[str, Any]


class Extension(BaseModel):
    """`everwarm` in the body: what no other API has."""

    model_config = ConfigDict(extra="forbid")
    agent: Annotated[str | None, Field(max_length=256)] = None
    cache: bool = True
    priority: Annotated[int, Field(ge=-100, le=100)] = 0


def tenant_of(request: Request) -> str:
    """Whose key was sent; `limits.Guard` has checked it."""
    tenant: str = request.scope[CALLER].tenant
    return tenant


def agent_of(request: Request) -> str | None:
    """The agent that the header names. Headers are bytes; they are read as UTF-8 where they are valid UTF-8."""
    name = request.headers.get("x-agent-id")
    try:
        return name and name.encode("latin-1").decode()
    except UnicodeError:
        return name


def with_ignored(response: Response, ignored: Sequence[str]) -> Response:
    """Name in a header what had no effect, for people who wonder."""
    if text := header_text(", ".join(ignored)[:500]):
        response.headers["X-Everwarm-Ignored"] = text
    return response


def header_text(text: str) -> str:
    """A text as the value of a header: with other characters, or spaces around it, no response could be sent."""
    return "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in text).strip()


def template_text(content: object, where: str) -> str | list[Json] | None:
    """The text of a message, or its parts: how several are joined is the template's business. Raises ApiError 400."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(400, f"{where}: expected a text or a list of parts, found {type(content).__name__}")
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise ApiError(400, f"{where}.{number}: only text is supported, found {str(kind)[:50]!r}")
    if len(content) < 2:
        return content[0]["text"] if content else ""
    return [{"type": "text", "text": part["text"]} for part in content]


def template_tools(tools: Sequence[Json] | None) -> Sequence[Json] | None:
    """Tools in OpenAI's form. Raises ApiError 400 for what is no function with a name."""
    if not tools:
        return None
    for number, tool in enumerate(tools):
        function = tool.get("function") if tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ApiError(400, f"tools.{number}: only functions with a name are supported")
        if not isinstance(function.get("parameters") or {}, dict):
            raise ApiError(400, f"tools.{number}.function.parameters: expected a JSON schema, an object")
    return [_plain_tool(tool) for tool in tools]


def _plain_tool(tool: Json) -> Json:
    """With all that templates read: some fail where a description or parameters are missing."""
    function = tool["function"]
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return {
        **tool,
        "function": {**function, "description": function.get("description") or "", "parameters": parameters},
    }


def check_choice(choice: ToolChoice, tools: Sequence[Json] | None) -> ToolChoice:
    """Raises ApiError 400 if nothing that was offered could fulfil it."""
    names = {tool["function"]["name"] for tool in tools or ()}
    if choice.mode == "required" and not names:
        raise ApiError(400, "tool_choice: a call is required, but tools is empty; send at least one tool")
    for name in choice.names:
        if name not in names:
            raise ApiError(400, f"tool_choice: {name[:100]!r} is not among the tools; send it in tools")
    return choice

"""What clients send as messages and tools, as chat templates read it. Both APIs use it; what can't be read is a 400."""

from collections.abc import Sequence
from typing import Any

from everwarm.llm import LLM
from everwarm.server.errors import ApiError

Json = dict[str, Any]

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
         "function": "tool"}  # fmt: skip
"""What clients call those who speak, and what templates call them."""


def chat_message(message: Json, where: str) -> Json:
    """A message of OpenAI's: a developer speaks as the system does, content is text or parts of text."""
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(400, f"{where}.role: expected one of {', '.join(ROLES)}, found {str(role)[:50]!r}")
    return message | {"role": ROLES[role], "content": text_of(message.get("content"), f"{where}.content")}


def text_of(content: object, where: str) -> str | list[Json] | None:
    """A text, or parts of it: how several are joined is the template's business."""
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


def checked_tools(llm: LLM, tools: Sequence[Json] | None) -> Sequence[Json] | None:
    """Tools in OpenAI's form, if the model has been taught to read them: what it never sees it can't call."""
    if not tools:
        return None
    for number, tool in enumerate(tools):
        function = tool.get("function") if tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"tools.{number}: only functions with a name are supported")
    if "tools" not in llm.template.variables(tools=True):
        raise ApiError(400, "tools: this model's chat template does not read them; use a model that was made for tools")
    return tools

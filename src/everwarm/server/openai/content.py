"""OpenAI's messages as chat templates read them. What can't be read is a 400."""

from everwarm.server.errors import ApiError
from everwarm.server.request import Json, template_text

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
         "function": "tool"}  # fmt: skip
"""The roles that clients send, and what templates call them."""


def chat_message(message: Json, where: str) -> Json:
    """A message with a role that templates know; its content is text or parts of text."""
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(400, f"{where}.role: expected one of {', '.join(ROLES)}, found {str(role)[:50]!r}")
    return message | {"role": ROLES[role], "content": template_text(message.get("content"), f"{where}.content")}

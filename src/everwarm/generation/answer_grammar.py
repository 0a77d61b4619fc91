"""What the answer to a chat must follow: a grammar that was asked for, and tools that must be called, or called as
their schemas say.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from everwarm.errors import RequestError
from everwarm.structured.calls import grammar_for_calls, tool_schemas
from everwarm.structured.grammar import Grammar
from everwarm.text.chat_format import ChatFormat
from everwarm.text.tool_calls.choice import ToolChoice
from everwarm.text.tool_calls.parsers import PARSERS

Tool = Mapping[str, Any]


def answer_grammar(
    asked: Grammar | None,
    chat: ChatFormat,
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    controls: Mapping[str, int],
) -> Grammar | None:
    """None if any answer will do. `tools` are in OpenAI's form, with names. Raises RequestError.

    A required call leaves nothing else. Otherwise, JSON that was `asked` for and calls exclude each other, and calls,
    once they have begun, are bound by tools that are strict and by a choice that names some. With any other grammar no
    tool is called.
    """
    choice = choice or ToolChoice()
    if not tools or choice.mode == "none":
        return asked
    format_ = chat.call_format
    if format_ is None:
        if choice.mode == "required":
            raise RequestError("tool_choice: calls are not read here (--tool-parser none), so none can be required")
        return asked
    strict = [tool["function"]["name"] for tool in tools if tool["function"].get("strict")]
    required = choice.mode == "required"
    if not required and (not asked.is_json if asked is not None else not (strict or choice.names)):
        return asked
    return grammar_for_calls(
        format_,
        tool_schemas(tools),
        choice.names,
        choice.parallel,
        required=required,
        openers=PARSERS[format_.name].openers,
        answer=None if required else asked,
        strict=strict,
        controls=controls,
    )

"""Tools for chat templates that know none, or only a part: what a template leaves out is written into the messages.

In: messages with tool calls and results, and the tools. Out: messages that say the same in plain text. Texts are
messages like any other: nothing in them becomes a control token.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from everwarm.text.template.dialect import ToolSupport
from everwarm.text.tool_calls.formats import FORMATS, Arguments, ToolFormat

Message = Mapping[str, Any]

_EXPLANATION = """\
You can call the tools that are listed here, one JSON object per line, each with the JSON schema of its parameters:

{tools}

To call a tool, write its name and its arguments in exactly this form, with nothing else around it:

{example}

Write one such block for each call. The results come with the next message. If no tool is needed, answer as usual."""


def with_tools_in_text(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], support: ToolSupport, format_: str
) -> list[Message]:
    """The messages; what the template does by itself is left to it."""
    form = FORMATS[format_]
    out = list(messages)
    if not support.writes_calls:
        out = [_calls_in_text(message, form) for message in out]
    if not support.writes_results:
        out = _results_in_text(out)
    if tools and not support.lists_tools:
        out = _listed(out, tools_text(tools, form), support.takes_system)
    return out


def tools_text(tools: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    """What a model is told of its tools."""
    listed = "\n".join(_json(tool.get("function", tool)) for tool in tools)
    return _EXPLANATION.format(tools=listed, example=_written(form, [("TOOL_NAME", {"PARAMETER": "VALUE"})]))


def _written(form: ToolFormat, calls: Sequence[tuple[str, Any]]) -> str:
    """Calls as a model writes them."""
    if form.arguments is not Arguments.JSON:  # no template is known that would need it
        form = FORMATS["hermes"]
    each = [
        form.call_begin
        + name
        + form.after_name
        + (arguments if isinstance(arguments, str) else _json(arguments))
        + form.call_end
        for name, arguments in calls
    ]
    return form.calls_begin + form.separator.join(each) + form.calls_end


def _calls_in_text(message: Message, form: ToolFormat) -> Message:
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not isinstance(calls, list) or not calls:
        return message
    functions = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
    named = [
        (str(function.get("name", "")), function.get("arguments") or {})
        for function in functions
        if isinstance(function, Mapping)
    ]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": _joined(message.get("content"), _written(form, named), "\n")}


def _results_in_text(messages: Sequence[Message]) -> list[Message]:
    """Results become what the user says. Results in a row, and what the user says next, are one message: many templates
    refuse two of one role.
    """
    out: list[Message] = []
    results: list[str] = []  # in a row, so far

    def end_results(said: str = "") -> None:
        if results:
            out.append({"role": "user", "content": "\n".join(results) + said})
            results.clear()

    for message in messages:
        role = message.get("role")
        if role == "tool":
            results.append(f"<tool_response>\n{_joined(message.get('content'), '', '')}\n</tool_response>")
        elif role == "user" and results and isinstance(message.get("content"), str):
            end_results(f"\n\n{message['content']}")
        else:
            end_results()
            out.append(message)
    end_results()
    return out


def _listed(messages: list[Message], text: str, takes_system: bool) -> list[Message]:
    """The list of tools behind what the system says; before what the user says first, if there is no system."""
    role = "system" if takes_system else "user"
    for number, message in enumerate(messages[:1] if takes_system else messages):
        if message.get("role") == role:
            content = message.get("content")
            both = _joined(content, text, "\n\n") if takes_system else f"{text}\n\n{_joined(content, '', '')}"
            return [*messages[:number], {**message, "content": both}, *messages[number + 1 :]]
    return [{"role": role, "content": text}, *messages]


def _joined(content: Any, text: str, between: str) -> str:
    """Content, which may be in parts, and a text behind it."""
    if isinstance(content, list):
        content = "\n".join(str(part.get("text", "")) if isinstance(part, Mapping) else str(part) for part in content)
    return f"{content}{between}{text}" if content else text


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

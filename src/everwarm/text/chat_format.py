"""How one model's conversations are written, and how its answers are read: template, tool calls and reasoning together.

In: messages, tools and what a client asks of them. Out: segments for the tokenizer, and a maker of parsers for the
answer. What is not known from the template is said by settings.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from everwarm.errors import RequestError
from everwarm.text.chat import ChatTemplate, Watch
from everwarm.text.output_parser import OutputParser, PlainText
from everwarm.text.reasoning import HARMONY, ReasoningParser, Thinking, begins_inside, reasoning_format_of
from everwarm.text.tool_calls.formats import FORMATS, ToolFormat
from everwarm.text.tool_calls.in_text import with_tools_in_text
from everwarm.text.tool_calls.lenient import NAME as LENIENT
from everwarm.text.tool_calls.lenient import Lenient, WholeObject
from everwarm.text.tool_calls.parsers import call_parser, id_maker
from everwarm.text.tool_calls.reader import Tools
from everwarm.text.tool_calls.selection import format_of
from everwarm.types import Segment

Tool = Mapping[str, Any]
Message = Mapping[str, Any]

DEFAULT = "hermes"
"""The format that models are asked for whose templates tell of none. Many were trained on it."""

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "watch", "bos_token", "eos_token"})
"""Variables of templates that a request has fields for."""


class ChatFormat:
    """Of one model. Threads may share it."""

    def __init__(
        self, template: ChatTemplate, controls: frozenset[str], *, tool_parser: str = "auto", lenient: bool = True
    ) -> None:
        """`controls` are the control tokens of the vocabulary. `tool_parser` is a format, `auto` or `none`."""
        self.template = template
        self._controls = controls
        self._tool_parser = tool_parser
        self._lenient = lenient
        self.reasoning = reasoning_format_of(template.source())

    @property
    def tool_format(self) -> str:
        """How this model writes calls."""
        if self._tool_parser not in ("auto", "none"):
            return self._tool_parser
        support = self.template.tool_support()
        known = support.lists_tools or support.writes_calls
        return (format_of(self.template.source(tools=True)) if known else None) or DEFAULT

    @property
    def call_format(self) -> ToolFormat | None:
        """The marks around calls; None if calls are left as text."""
        return None if self._tool_parser == "none" else FORMATS[self.tool_format]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        thinking: Thinking | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        watch: Watch | None = None,
    ) -> list[Segment]:
        """The prompt. `variables` are the client's own, for the template; they win. If the last message is the
        assistant's, the prompt ends inside it: the answer continues it. Without `add_generation_prompt` it ends behind
        the last message.
        """
        if wrong := _RESERVED.intersection(variables or ()):
            raise RequestError(f"chat_template_kwargs: {', '.join(sorted(wrong))} can't be set here; use its own field")
        known: dict[str, Any] = {**(thinking or Thinking()).variables(), **(variables or {})}
        known |= {"add_generation_prompt": add_generation_prompt}
        if tools or any(message.get("tool_calls") or message.get("role") == "tool" for message in messages):
            support = self.template.tool_support()
            messages = with_tools_in_text(messages, tools or (), support, self.tool_format)
            if not support.lists_tools:
                tools = None
        begun = _begun(messages) if add_generation_prompt else None
        if begun is None:
            return self.template.render(messages, tools=tools, watch=watch, **known)
        return [*self.template.render(messages[:-1], tools=tools, watch=watch, **known), Segment(begun)]

    def parser(
        self, tools: Sequence[Tool] | None, prompt: Sequence[Segment], *, strict: bool = False
    ) -> Callable[[], OutputParser]:
        """Makes a parser for each answer to a prompt. A `strict` one takes no call for one that is not written in the
        model's own format.
        """
        schemas = _schemas(tools or ())
        reasoning = self.reasoning
        inside = reasoning is not None and begins_inside(reasoning, prompt)

        def make() -> OutputParser:
            if reasoning is HARMONY:
                return call_parser("harmony", schemas, self._controls)
            parser = self._call_parser(schemas, lenient=self._lenient and not strict)
            if reasoning is None:
                return parser
            return ReasoningParser(reasoning, parser, inside=inside, controls=self._controls)

        return make

    def _call_parser(self, tools: Tools, *, lenient: bool) -> OutputParser:
        if not tools or self._tool_parser == "none":
            return PlainText()
        name = self.tool_format
        parser = call_parser(name, tools, self._controls)
        if not lenient:
            return parser
        reader = WholeObject(LENIENT, tools, self._controls, id_maker(name))
        return Lenient(parser, reader, fenced_only=name == "llama3")


def with_answer(messages: Sequence[Message], answer: Message) -> tuple[Message, ...]:
    """A conversation with the answer to it, which goes on in the last message if that has begun it."""
    begun = _begun(messages)
    if begun is None:
        return (*messages, answer)
    return (*messages[:-1], {**messages[-1], **answer, "content": begun + (answer["content"] or "")})


def _begun(messages: Sequence[Message]) -> str | None:
    """The text of an answer that was begun and is to be continued: the last message, if it is the assistant's."""
    last = messages[-1] if len(messages) > 1 else None
    if last is None or last.get("role") != "assistant" or last.get("tool_calls"):
        return None
    content = last.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) and content else None


def _schemas(tools: Sequence[Tool]) -> dict[str, Mapping[str, Any]]:
    """The schemas of the arguments, by the names of the tools."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            schema = function.get("parameters")
            found[function["name"]] = schema if isinstance(schema, Mapping) else {}
    return found

"""Chat messages to prompt, by the template that the model file brings along.

In: messages, tools and documents as clients send them. Out: segments; a special one is a control token that the
template wrote. Invariants: nothing that a message says becomes a control token; the joined text is what Hugging Face
transformers renders; a hostile template costs bounded time and memory, and ends in a TemplateError.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Any

from everwarm.errors import TemplateError
from everwarm.text.template.dialect import DEPTH_LIMIT, Dialect, Message, ToolSupport
from everwarm.text.template.meter import Limits, Meter, Refused, running
from everwarm.text.template.sandbox import Program, one_line
from everwarm.text.template.tokens import ControlTokens, Guard
from everwarm.types import Metadata, Segment

KEY = "tokenizer.chat_template"
TOOL_USE = "tool_use"

CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %}
"""
"""Used for files without a template, if their vocabulary has both tokens."""

Watch = Callable[[Sequence[Segment]], None]
"""Sees what a template has written so far, if it is long; may raise RequestError to stop it. The last segment may be
the beginning of a control token.
"""


class ChatTemplate:
    """A model's templates: the default one, and perhaps one for requests with tools. Threads may share it."""

    def __init__(
        self,
        sources: Mapping[str, str],
        *,
        special_tokens: Iterable[str],
        bos: str = "",
        eos: str = "",
        now: Callable[[], datetime] = datetime.now,
        limits: Limits | None = None,
    ) -> None:
        """`sources` by name, "default" first of all. Others than the default are compiled at first use."""
        self._sources = dict(sources)
        self._tokens = ControlTokens(special_tokens)
        self._now = now
        self._limits = limits or Limits()
        with _metered(Meter(self._limits, 0)):
            self._special = {"bos_token": self._tokens.mark(bos), "eos_token": self._tokens.mark(eos)}
        self._compiled: dict[str, _Compiled | TemplateError] = {}
        self._template(next(iter(self._sources)))

    @classmethod
    def from_metadata(
        cls,
        metadata: Metadata,
        *,
        special_tokens: Iterable[str],
        bos: str,
        eos: str,
        now: Callable[[], datetime] = datetime.now,
        limits: Limits | None = None,
    ) -> "ChatTemplate":
        """The templates of a GGUF file. `special_tokens` are the texts of its control tokens."""
        special_tokens = frozenset(special_tokens)
        sources = _sources(metadata)
        if not sources:
            if not {"<|im_start|>", "<|im_end|>"} <= special_tokens:
                raise TemplateError("the model file has no chat template; continue a raw prompt instead (--raw)")
            sources = {"default": CHATML}
        return cls(sources, special_tokens=special_tokens, bos=bos, eos=eos, now=now, limits=limits)

    def render(
        self,
        /,  # a variable may have its name
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[object] | None = None,
        documents: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        watch: Watch | None = None,
        **variables: object,
    ) -> list[Segment]:
        """The prompt. Further variables are those of the template itself, such as `enable_thinking`."""
        template = self._template(self._choose(tools=tools is not None))
        inputs = {
            "messages": template.dialect.adapt(_checked(messages)),
            "tools": _objects(tools, "tools"),
            "documents": _objects(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
            **{name: _plain(value, name) for name, value in variables.items()},
        }
        return template.render(inputs, watch=watch)

    def variables(self, *, tools: bool = False) -> frozenset[str]:
        """Names that the template reads: says whether `tools`, `documents` or `enable_thinking` have any effect."""
        return self._template(self._choose(tools=tools)).program.variables

    def source(self, *, tools: bool = False) -> str:
        """The template itself."""
        return self._sources[self._choose(tools=tools)]

    def tool_support(self) -> ToolSupport:
        """What becomes of tools in it."""
        return self._template(self._choose(tools=True)).dialect.tools

    def _choose(self, *, tools: bool) -> str:
        return TOOL_USE if tools and TOOL_USE in self._sources else next(iter(self._sources))

    def _template(self, name: str) -> "_Compiled":
        if name not in self._compiled:  # two threads may both compile it: the same result, and no lock
            try:
                self._compiled[name] = _Compiled(
                    self._sources[name], self._tokens, self._special, self._now, self._limits
                )
            except TemplateError as error:
                self._compiled[name] = error
        found = self._compiled[name]
        if isinstance(found, TemplateError):  # remembered: finding it out may have taken seconds
            raise TemplateError(str(found)) from found.__cause__
        return found


class _Compiled:
    """One template with everything that is known about it. One meter counts all that is done to find it out."""

    def __init__(
        self,
        source: str,
        tokens: ControlTokens,
        special: Mapping[str, str],
        now: Callable[[], datetime],
        limits: Limits,
    ) -> None:
        self._tokens = tokens
        self._special = special
        self._limits = limits
        meter = Meter(limits, 0)
        self.program = Program(source, tokens, now, meter)
        with _metered(meter):
            self._frames = tokens.frames(self.program.literals)
            self._built = {token for word in ("", *self.program.literals) for token in self._frames.around(word)}
            self.dialect = Dialect.of(partial(self._attempt, meter))

    def render(
        self, inputs: Mapping[str, Any], meter: Meter | None = None, watch: Watch | None = None
    ) -> list[Segment]:
        """The segments; what they cost is counted by a meter of their own, if none is given."""
        guard = Guard(inputs, self._tokens)
        with _metered(meter or Meter(self._limits, guard.size)):
            built = set(self._built)
            for word in {word for message in inputs["messages"] for word in _spellings(message["role"])}:
                built |= self._frames.around(word)
            guard.built = ControlTokens(built)
            see = None if watch is None else lambda text: watch(guard.read(text))
            return guard.read(self.program.run({**self._special, **guard.clear(inputs)}, see))

    def _attempt(self, meter: Meter, messages: list[Message], tools: list[Any] | None) -> str | None:
        inputs = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": False}
        try:
            return "".join(segment.text for segment in self.render(inputs, meter))
        except TemplateError as error:
            if isinstance(error.__cause__, Refused):  # too costly already for two words: not worth another try
                raise
            return None


def _spellings(role: str) -> tuple[str, ...]:
    """How a template may write a role."""
    return role, role.lower(), role.upper(), role.capitalize()


@contextmanager
def _metered(meter: Meter) -> Iterator[None]:
    """What is refused within is a fault of the template."""
    with running(meter):
        try:
            yield
        except Refused as error:
            raise TemplateError(f"chat template: {error}") from error


def _sources(metadata: Metadata) -> dict[str, str]:
    """Templates by name, the default one first; one of another name stands in if there is no default."""
    found = {}
    for key, value in metadata.items():
        if key == KEY or key.startswith(KEY + "."):
            if not isinstance(value, str):
                raise TemplateError(f"{key}: expected a text, found {type(value).__name__}")
            found[key[len(KEY) + 1 :] or "default"] = value
    return dict(sorted(found.items(), key=lambda item: (item[0] != "default", item[0])))


def _checked(messages: object) -> list[Message]:
    """Plain copies of the messages, each with a role."""
    if not isinstance(messages, list | tuple):
        raise TemplateError(f"messages: expected a list, found {type(messages).__name__}")
    if not messages:
        raise TemplateError("messages: the list is empty; send at least one message")
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise TemplateError(f"{where}: expected an object with role and content, found {type(message).__name__}")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise TemplateError(f"{where}: the role is missing (system, user, assistant or tool)")
        content = message.get("content")
        if content is not None and not isinstance(content, str | list | tuple | Mapping):
            raise TemplateError(f"{where}.content: expected a text or a list of parts, found {type(content).__name__}")
    plain: list[Message] = _plain(messages, "messages")
    return plain


def _objects(values: object, where: str) -> Any:
    """Plain copies of tools or documents."""
    if values is not None and (not isinstance(values, list | tuple) or not all(isinstance(v, Mapping) for v in values)):
        raise TemplateError(f"{where}: expected a list of objects")
    return _plain(values, where)


def _plain(value: object, where: str, depth: int = 0) -> Any:
    """A copy made of JSON types only: a template must not meet methods that the sandbox knows nothing of."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if depth == DEPTH_LIMIT:
        raise TemplateError(f"{one_line(where)}: nested more than {DEPTH_LIMIT} deep")
    if isinstance(value, Mapping):
        # A path names each value in case it is refused: a long key must not be copied for everything below it.
        return {_key(key, where): _plain(item, f"{where}.{key[:80]}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{number}]", depth + 1) for number, item in enumerate(value)]
    raise TemplateError(f"{one_line(where)}: expected JSON data, found {type(value).__name__}")


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise TemplateError(f"{one_line(where)}: expected texts as keys, found {type(key).__name__}")
    return str.__str__(key)

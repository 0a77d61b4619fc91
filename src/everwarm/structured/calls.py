"""Grammars of tool calls: an answer that must call a tool, or must call as the schemas say if it calls any.

In: how a family of models writes calls (`CallFormat`) and the tools. Out: a grammar that begins where the first call
begins, or, if calls are not required, with any text before it.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from everwarm.errors import RequestError
from everwarm.structured.grammar import MOST_SCHEMA_BYTES, Grammar, literal, schema_rule
from everwarm.structured.schema import is_quick

Tools = Mapping[str, Mapping[str, Any]]
"""The tools that are offered: the JSON schemas of their arguments, by name."""


class ArgumentTags(Protocol):
    """One argument: begin NAME after_name VALUE end. A text is written as it is, all other values as JSON."""

    @property
    def begin(self) -> str: ...
    @property
    def after_name(self) -> str: ...
    @property
    def end(self) -> str: ...


class CallFormat(Protocol):
    """How calls are written: calls_begin, then call_begin NAME after_name ARGUMENTS call_end for each call, with
    `separator` between two of them, then calls_end.
    """

    @property
    def calls_begin(self) -> str: ...
    @property
    def call_begin(self) -> str: ...
    @property
    def after_name(self) -> str: ...
    @property
    def arguments(self) -> str:
        """`json` (one object), `tagged` (`tags`), `python` (name=value, ...) or `gemma` ({name:value,...})."""

    @property
    def tags(self) -> ArgumentTags | None: ...
    @property
    def quote(self) -> str:
        """Around texts, with `gemma`."""

    @property
    def call_end(self) -> str: ...
    @property
    def separator(self) -> str: ...
    @property
    def calls_end(self) -> str: ...


def grammar_for_calls(
    format_: CallFormat,
    tools: Tools,
    names: Collection[str] = (),
    parallel: bool = True,
    *,
    required: bool = True,
    openers: Sequence[str] = (),
    answer: Grammar | None = None,
    strict: Collection[str] | None = None,
    controls: Mapping[str, int],
    name: str = "tools",
) -> Grammar:
    """Answers that call tools: one of those in `names`, or any; several calls only if `parallel`. If calls are not
    `required`, any text may come before them, or instead of them, up to one of the `openers`: texts that whoever reads
    the answer takes for the beginning of a call (by default only what the format begins with). A brace is one only if
    the answer begins with it. With `answer`, a grammar of JSON, only such JSON may come instead of calls. Keywords that
    are not supported are refused in the schemas of `strict` tools (by default all) and bind nothing in others.
    `controls` are the control tokens of the vocabulary by name; where the format names one, only that token is allowed.
    Raises RequestError, which names the tool.
    """
    if unknown := [tool for tool in names if tool not in tools]:
        raise RequestError(f"tool_choice: {unknown[0][:100]!r} is not among the tools")
    chosen = frozenset(names)
    offered = {tool: schema for tool, schema in tools.items() if not chosen or tool in chosen}
    if not offered:
        raise RequestError("tool_choice: a call is required, but no tools are given")
    rules = _Rules(format_, controls, parallel, set(offered) if strict is None else strict, name)
    rules.add("body", " | ".join(rules.body(at, tool, schema) for at, (tool, schema) in enumerate(offered.items())))
    rules.add("call", f"{rules.text(format_.call_begin)} body")
    if answer is not None:
        rules.add("start", f"{rules.calls()} | {answer.text.removeprefix('start: ')}")
    else:
        rules.add("start", rules.calls() if required else rules.text_or_calls(openers))
    text = "\n".join(rules.lines())
    quick = (required or answer is not None) and (answer is None or answer.quick)
    return Grammar(text, name, quick and all(is_quick(schema) for schema in offered.values()))


def tool_schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Tools as OpenAI writes them: the schemas of their arguments, by name."""
    functions = (tool["function"] for tool in tools)
    return {function["name"]: function.get("parameters") or {} for function in functions}


class _Rules:
    """The rules of one grammar, as they are made."""

    def __init__(
        self, format_: CallFormat, controls: Mapping[str, int], parallel: bool, strict: Collection[str], name: str
    ) -> None:
        self._format = format_
        self._strict = strict
        self._controls = controls
        self._parallel = parallel
        self._name = name
        self._rules = {"TEXT": r"/(.|\n)*/"}
        self._size = 0

    def add(self, rule: str, body: str) -> str:
        """A rule under this name. Raises RequestError as soon as there are too many."""
        self._rules[rule] = body
        self._size += len(body)
        if self._size > MOST_SCHEMA_BYTES:
            raise RequestError(f"{self._name}: more than {MOST_SCHEMA_BYTES:,} bytes of schemas, which is the limit")
        return rule.removesuffix("[lazy]")

    def lines(self) -> Iterator[str]:
        for rule, body in self._rules.items():
            yield f"{rule}: {body}"

    def text(self, text: str) -> str:
        """A text of the format as a part of a rule: names of control tokens are those tokens."""
        parts = [self._control(piece) or literal(piece) for piece in self._pieces(text)]
        return " ".join(parts) or '""'

    def calls(self, read: str = "") -> str:
        """One call or several. `read` is how they begin, if that is behind us."""
        format_ = self._format
        if format_.calls_begin:
            first = f"{self.text(format_.calls_begin.removeprefix(read))} call"
        else:
            first = f"{self.text(format_.call_begin.removeprefix(read))} body"
        more = f"({self.text(format_.separator)} call)*" if self._parallel else ""
        return f"{first} {more} {self.text(format_.calls_end)}"

    def text_or_calls(self, openers: Sequence[str]) -> str:
        """Any text, up to where calls begin."""
        begin = self._format.calls_begin or self._format.call_begin
        pieces = list(self._pieces(begin))
        control = next((at for at, piece in enumerate(pieces) if self._control(piece)), None)
        if control is not None:  # no text has it
            return f"TEXT | TEXT {self.calls(''.join(pieces[:control]))}"
        if begin.startswith("{"):
            plain = self.add("PLAIN", r"/[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/")
            return f"{plain} | {self.calls()}"
        found = ["TEXT"]
        for number, mark in enumerate([one for one in openers if one in begin] or [begin.strip()]):
            before = self.add(f"before_{number}[lazy]", f"TEXT {literal(mark)}")  # it ends where the mark first appears
            found.append(f"{before} {self.calls(begin[: begin.index(mark) + len(mark)])}")
        return " | ".join(found)

    def body(self, number: int, tool: str, schema: Mapping[str, Any]) -> str:
        """The rule of a call to one tool, from the tool's name on."""
        where, lenient = f"{self._name}: {tool[:100]}", tool not in self._strict
        if not isinstance(schema, Mapping):
            raise RequestError(f"{where}: parameters: expected a JSON schema")
        match str(self._format.arguments):
            case "json":
                arguments = schema_rule(dict(schema) or {"type": "object"}, where, lenient=lenient)
            case "tagged":
                arguments = self._tagged(number, schema, where, lenient)
            case "python":
                pairs = _properties(schema, where)
                items = [
                    (f"{literal(key + '=')} {_value(schema, sub, where, lenient)}", needed)
                    for key, sub, needed in pairs
                ]
                arguments = self._list(f"list_{number}", items, ", ")
            case "gemma":
                pairs = _properties(schema, where)
                items = [(f"{literal(key + ':')} {self._gemma_value()}", needed) for key, _, needed in pairs]
                arguments = f'"{{" {self._list(f"list_{number}", items, ",")} "}}"'
            case other:
                raise RequestError(f"tool_choice: calls that are written as {other} can't be forced")
        after_name, end = self.text(self._format.after_name), self.text(self._format.call_end)
        return self.add(f"body_{number}", f"{literal(tool)} {after_name} {arguments} {end}")

    def _pieces(self, text: str) -> Iterator[str]:
        """Names of control tokens, and what is between them."""
        names = sorted((name for name in self._controls if name in text), key=len, reverse=True)
        pattern = "|".join(map(re.escape, names))
        for piece in re.split(f"({pattern})", text) if names else [text]:
            if piece:
                yield piece

    def _control(self, piece: str) -> str | None:
        return f"<[{self._controls[piece]}]>" if piece in self._controls else None

    def _tagged(self, number: int, schema: Mapping[str, Any], where: str, lenient: bool) -> str:
        tags = self._format.tags
        assert tags is not None
        parts = []
        for at, (key, sub, needed) in enumerate(_properties(schema, where)):
            is_text = bool(_texts(sub)) or sub.get("type") == "string"
            # DeepSeek's tag says whether the value is a text.
            after_name = tags.after_name if is_text else tags.after_name.replace('string="true"', 'string="false"')
            begin = f"{self.text(tags.begin)} {literal(key)} {self.text(after_name)}"
            if _texts(sub):
                value = f"({' | '.join(map(literal, _texts(sub)))}) {self.text(tags.end)}"
            elif is_text:
                value = self._until(f"text_{number}_{at}", tags.end)
            else:
                value = f"{_value(schema, sub, where, lenient)} {self.text(tags.end)}"
            part = self.add(f"argument_{number}_{at}", f"{begin} {value}")
            parts.append(part if needed else f"{part}?")
        return " ".join(parts) or '""'

    def _until(self, rule: str, end: str) -> str:
        """Any text, and then its end: where the mark in `end` first appears, whatever white space is before it."""
        pieces = list(self._pieces(end))
        if any(self._control(piece) for piece in pieces):
            return f"TEXT {self.text(end)}"
        after = end[len(end.rstrip()) :]
        return f"{self.add(f'{rule}[lazy]', f'TEXT {literal(end.strip())}')} {literal(after) if after else ''}"

    def _list(self, rule: str, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Items in this order, with separators between them; those that are not needed may be left out."""
        comma = literal(separator)
        first = after = '""'  # of what follows: if nothing was written so far, or if something was
        for at, (item, needed) in reversed(list(enumerate(items))):
            one = self.add(f"{rule}_{at}", item)
            skip_first, skip_after = ("", "") if needed else (f" | {first}", f" | {after}")
            first = self.add(f"{rule}_first_{at}", f"{one} {after}{skip_first}")
            after = self.add(f"{rule}_after_{at}", f"{comma} {one} {after}{skip_after}")
        return first

    def _gemma_value(self) -> str:
        """Any value: texts stand between quote marks of their own, keys have none."""
        if "value" not in self._rules:
            quote = self._format.quote
            text = f"{self.text(quote)} {self._until('quoted', quote)}"
            self.add("KEY", r"/[\w$.\-]+/")
            self.add("pair", 'KEY ":" value')
            plain = schema_rule({"type": ["number", "boolean", "null"]}, self._name)
            lists = '"[" (value ("," value)*)? "]" | "{" (pair ("," pair)*)? "}"'
            self.add("value", f"{text} | {plain} | {lists}")
        return "value"


def _properties(schema: Mapping[str, Any], where: str) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Name, schema and whether it is required, of each argument, in the order of the schema."""
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise RequestError(f"{where}: parameters: expected properties and a list of those that are required")
    return [(key, sub if isinstance(sub, Mapping) else {}, key in required) for key, sub in properties.items()]


def _value(schema: Mapping[str, Any], sub: Mapping[str, Any], where: str, lenient: bool) -> str:
    """A value as JSON. What its schema refers to is in the schema around it."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return schema_rule(shared | dict(sub), where, lenient=lenient)


def _texts(schema: Mapping[str, Any]) -> list[str]:
    """The texts that a value may be, if the schema names all of them."""
    texts = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return texts if isinstance(texts, list) and all(isinstance(text, str) and text for text in texts) else []

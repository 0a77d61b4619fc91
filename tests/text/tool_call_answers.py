"""Answers in every format, with what they mean; and calls of all kinds, for round trips."""

import random
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from everwarm.events import Content
from everwarm.text.tool_calls.parsers import PARSERS, call_parser
from everwarm.text.tool_calls.reader import CallReader
from output_parsers import joined

TOOLS: dict[str, Any] = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": "array"}, "any": {}},
    },
    "now": {"type": "object", "properties": {}},
}

ARGUMENTS = {"a": 1, "s": 'Zürich "\\\n👩‍🚀 </x> {', "l": [1, 2.5, {"k": None}]}

_JSON = r'{"a": 1, "s": "Zürich \"\\\n👩‍🚀 </x> {", "l": [1, 2.5, {"k": null}]}'
_RAW = 'Zürich "\\\n👩‍🚀 </x> {'
_LIST = '[1, 2.5, {"k": null}]'
_OBJECT, _NOW = f'{{"name": "add", "arguments": {_JSON}}}', '{"name": "now", "arguments": {}}'

ANSWERS = {
    "hermes": f"Let me see.\n<tool_call>\n{_OBJECT}\n</tool_call>\n<tool_call>\n{_NOW}\n</tool_call>\n\nDone.",
    "qwen3-coder": (
        f"Let me see.\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n{_RAW}\n"
        f"</parameter>\n<parameter=l>\n{_LIST}\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>Done."
    ),
    "seed": (
        f"Let me see.<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=s>{_RAW}</parameter>\n"
        f"<parameter=l>{_LIST}</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n"
        "</function>\n</seed:tool_call>Done."
    ),
    "minimax": (
        f'Let me see.\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        f'<parameter name="s">{_RAW}</parameter>\n<parameter name="l">{_LIST}</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>\nDone.'
    ),
    "glm": (
        "Let me see.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n"
        f"<arg_value>{_RAW}</arg_value>\n<arg_key>l</arg_key>\n<arg_value>{_LIST}</arg_value>\n</tool_call>\n"
        "<tool_call>now\n</tool_call>Done."
    ),
    "llama3": f'<|python_tag|>{{"name": "add", "parameters": {_JSON}}}; {{"name": "now", "parameters": {{}}}}Done.',
    "mistral": f"Let me see.[TOOL_CALLS]add[ARGS]{_JSON}[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{{}}Done.",
    "mistral-json": f"Let me see.[TOOL_CALLS] [{_OBJECT}, {_NOW}]Done.",
    "harmony": (
        "<|channel|>final<|message|>Let me see.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        f"<|constrain|>json<|message|>{_JSON}<|call|><|start|>assistant to=functions.now<|channel|>commentary json"
        "<|message|>{}<|call|><|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    ),
    "deepseek-r1": (
        "Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
        f"```json\n{_JSON}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n"
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>Done."
    ),
    "deepseek-v3.1": (
        f"Let me see.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{_JSON}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>Done."
    ),
    "deepseek-v3.2": (
        'Let me see.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
        f'<｜DSML｜parameter name="s" string="true">{_RAW}</｜DSML｜parameter>\n'
        f'<｜DSML｜parameter name="l" string="false">{_LIST}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>Done.'
    ),
    "kimi": (
        "Let me see.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        f"{_JSON}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>Done."
    ),
    "granite": f"Let me see.<|tool_call|>[{_OBJECT}, {_NOW}]Done.",
    "apriel": f"Let me see.\n<tool_calls>[{_OBJECT}, {_NOW}]</tool_calls>\nDone.",
    "apertus": f'Let me see.<|tools_prefix|>[{{"add": {_JSON}}}, {{"now": {{}}}}]<|tools_suffix|>Done.',
    "command-r": (
        f'Let me see.<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "add", "parameters": {_JSON}}}, '
        '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}]<|END_ACTION|>Done.'
    ),
    "gigachat": f"Let me see.function call<|role_sep|>\n[{_OBJECT}, {_NOW}]<|message_sep|>Done.",
    "gemma": (
        f'Let me see.<|tool_call>call:add{{a:1,s:<|"|>{_RAW}<|"|>,l:[1,2.5,{{<|"|>k<|"|>:None}}]}}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>Done."
    ),
    "function-gemma": (
        f"Let me see.<start_function_call>call:add{{a:1,s:<escape>{_RAW}<escape>,l:[1,2.5,{{k:null}}]}}"
        "<end_function_call><start_function_call>call:now{}<end_function_call>Done."
    ),
    "tool-code": (
        "Let me see.\n```tool_code\nadd(a=1, s='Zürich \"\\\\\\n👩‍🚀 </x> {', l=[1, 2.5, {'k': None}])\n"
        "now()\n```\nDone."
    ),
    "lfm2": (
        'Let me see.<|tool_call_start|>[add(a=1, s="Zürich \\"\\\\\\n\\U0001f469‍🚀 </x> {", l=(1, 2.5, {"k": None})), '
        "now()]<|tool_call_end|>Done."
    ),
}
"""Each says "Let me see.", calls `add` with `ARGUMENTS` and `now` without, and says "Done."; Llama's says less."""


def parser(name: str, tools: Mapping[str, Any] = TOOLS, controls: Iterable[str] = ()) -> CallReader:
    """With ids that count."""
    numbers = iter(range(10**6))
    return call_parser(name, tools, frozenset(controls), lambda: f"call-{next(numbers)}")


def read(reader: CallReader, pieces: Iterable[str]) -> list[Content]:
    """Pieces that are control tokens go their own way, as in a generation."""
    content: list[Content] = []
    for piece in pieces:
        if piece:
            content += reader.control(piece) if piece in reader.control_tokens else reader.feed(piece)
    return joined([*content, *reader.finish()])


def at_marks(name: str, text: str) -> list[str]:
    """A text, cut where the marks of a format are."""
    marks = PARSERS[name].marks
    return re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]


def values(random: random.Random, depth: int, texts: list[str]) -> Any:
    """Any JSON value."""
    kind = random.choice(["text", "text", "int", "float", "bool", "null", *(["list", "dict"] if depth else [])])
    match kind:
        case "text":
            return "".join(random.choices(texts, k=random.randrange(6)))
        case "int":
            return random.choice([0, -1, 7, 10**18, random.randrange(-(10**6), 10**6)])
        case "float":
            return random.choice([0.5, -2.75, 1e-7, 1.5e300, random.random()])
        case "bool":
            return random.random() < 0.5
        case "null":
            return None
        case "list":
            return [values(random, depth - 1, texts) for _ in range(random.randrange(4))]
    return {f"k{number}": values(random, depth - 1, texts) for number in range(random.randrange(4))}


TEXTS = ['"', "\\", "\n", "\t", "é", "日本", "👩‍🚀", "\u2028", "{", "}", "[", "]", "<b>", "</b>", "&amp;", "'", "a",
         " ", "\\n", "\\u00e9", "```", "null", "12", "call", ":", ",", "{{ x }}", "<|", "|>"]  # fmt: skip


def generated_calls(count: int, texts: list[str] = TEXTS) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and arguments, always the same."""
    source = random.Random(13)
    for number in range(count):
        keys = source.sample(["city", "numbers", "x_1", "text", "größe", "Value"], source.randrange(5))
        yield f"tool_{number % 7}", {key: values(source, 3, texts) for key in keys}


def schema_of(value: Any) -> dict[str, Any]:
    """What a tool would say of such an argument."""
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return {"type": kinds.get(type(value), "null")}

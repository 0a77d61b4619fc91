"""Grammars of tool calls: what may be said when a call is required, or when tools are strict."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import pytest

from everwarm.errors import RequestError
from everwarm.structured.calls import grammar_for_calls, tool_schemas
from everwarm.structured.constraint import GrammarConstraint
from everwarm.structured.grammars import Grammars
from everwarm.text.tokenizer import Tokenizer
from golden.token_digests import read

FAMILY = "qwen2.5"
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "where": {"$ref": "#/$defs/place"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}},
}
TOOLS = {"weather": WEATHER, "now": {}}


@dataclass(frozen=True)
class Tags:
    begin: str
    after_name: str
    end: str


@dataclass(frozen=True)
class Form:
    """A `CallFormat`."""

    call_begin: str
    after_name: str
    call_end: str = ""
    arguments: str = "json"
    tags: Tags | None = None
    quote: str = '"'
    calls_begin: str = ""
    separator: str = ""
    calls_end: str = ""


HERMES = Form('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n")
IN_LIST = Form('{"name": "', '", "arguments": ', "}", calls_begin="<|im_start|>[", separator=", ", calls_end="]")
TAGGED = Form(
    "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "tagged",
    Tags("<parameter=", ">\n", "\n</parameter>\n"), separator="\n",
)  # fmt: skip
PYTHON = Form("", "(", ")", "python", calls_begin="<|im_start|>[", separator=", ", calls_end="]<|im_end|>")
GEMMA = Form("<|im_start|>call:", "", "<|im_end|>", "gemma", quote="<|box_start|>")


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(read(FAMILY).metadata)


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer())


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    grammars().close()


def new(form: Form, *options: object, **named: object) -> GrammarConstraint:
    made = grammar_for_calls(form, TOOLS, *options, controls=tokenizer().special_tokens, **named)  # type: ignore[arg-type]
    return grammars().constraint(made)()


def may(constraint: GrammarConstraint, id_: int) -> bool:
    mask = constraint.mask()
    assert mask is not None
    return bool(mask[id_ // 32] >> id_ % 32 & 1)


def accepts(constraint: GrammarConstraint, text: str) -> bool:
    """Whether a text may be a whole answer. Names of control tokens in it are those tokens."""
    ids = tokenizer().encode(text, special=True)
    for at, id_ in enumerate(ids):
        if not may(constraint, id_):
            return False
        constraint.advance(id_)
        if id_ in tokenizer().eog_ids:
            return at == len(ids) - 1
    return any(may(constraint, id_) for id_ in tokenizer().eog_ids)


CALLS = {
    "hermes": (
        HERMES,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln", "days": 2}}\n</tool_call>',
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "list": (
        IN_LIST,
        '<|im_start|>[{"name": "weather", "arguments": {"city": "Köln", "days": 2, "where": [1, 2.5]}}',
        ', {"name": "now", "arguments": {}}',
        "]",
    ),
    "tagged": (
        TAGGED,
        "<tool_call>\n<function=weather>\n<parameter=city>\nKöln </x>\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>",
        "\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "python": (
        PYTHON,
        '<|im_start|>[weather(city="Köln", days=2, where=[1, 2])',
        ", now()",
        "]<|im_end|>",
    ),
    "gemma": (
        GEMMA,
        "<|im_start|>call:weather{city:<|box_start|>Köln<|box_start|>,days:2,where:[1,{x:null}]}<|im_end|>",
    ),
}


@pytest.mark.parametrize("name", [name for name in CALLS if name != "gemma"])
def test_one_call_or_several_where_they_may_be_parallel(name: str) -> None:
    form, first, second, *end = CALLS[name]
    one, two = "".join([first, *end]), "".join([first, second, *end])
    assert accepts(new(form), one)
    assert accepts(new(form), two)
    assert accepts(new(form, (), False), one)
    assert not accepts(new(form, (), False), two)
    assert not accepts(new(form), "".join(["Well. ", one]))  # the call is required
    assert not accepts(new(form), one + " Done.")


@pytest.mark.parametrize("name", [name for name in CALLS if name != "gemma"])
def test_the_tool_that_was_chosen(name: str) -> None:
    form, first, second, *end = CALLS[name]
    assert accepts(new(form, ["weather"]), "".join([first, *end]))
    assert not accepts(new(form, ["weather"]), "".join([first, second, *end]))
    assert not accepts(new(form, ["now"]), "".join([first, *end]))


def test_texts_between_quote_marks_of_their_own() -> None:
    form, call = CALLS["gemma"]
    assert accepts(new(form), call)
    assert not accepts(new(form), call.replace("city", "town"))
    assert not accepts(new(form), call.replace("Köln<|box_start|>", "Köln"))


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": "x"}',
        '{"days": 2, "city": "x"}',  # in the order of the schema
        '{"city": "x", "days": "2"}',
        '{"city": "x", "days": 2, "unit": "K"}',
        '{"city": "x", "days": 2, "other": 1}',
        '{"city": "x", "days": 2, "where": [1]}',
    ],
)
def test_arguments_are_valid_under_the_schema(arguments: str) -> None:
    call = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    assert not accepts(new(HERMES), call)


@pytest.mark.parametrize("name", ["hermes", "list", "tagged"])
def test_strict_tools_bind_a_call_once_it_has_begun_and_nothing_before(name: str) -> None:
    form, first, _, *end = CALLS[name]
    call = "".join([first, *end])
    assert accepts(new(form, required=False), "No call at all: {x} <tool>.\n")
    assert accepts(new(form, required=False), call)
    assert accepts(new(form, required=False), f"Let me look. {call}")
    assert not accepts(new(form, required=False), f"Let me look. {call}".replace("weather", "unknown"))
    assert not accepts(new(form, required=False), f"Let me look. {call}".replace("2", '"two"'))


def test_a_name_that_is_a_control_token_is_spelt() -> None:
    made = grammar_for_calls(HERMES, {"<|im_end|>": {}}, controls=tokenizer().special_tokens)
    constraint = grammars().constraint(made)()
    for id_ in tokenizer().encode('<tool_call>\n{"name": "'):
        constraint.advance(id_)
    assert not may(constraint, tokenizer().special_tokens["<|im_end|>"])
    for id_ in tokenizer().encode('<|im_end|>", "arguments": {}}\n</tool_call>'):
        assert may(constraint, id_)
        constraint.advance(id_)


def test_what_cannot_be_forced_is_refused_by_name() -> None:
    controls = tokenizer().special_tokens
    with pytest.raises(RequestError, match="'nothing' is not among the tools"):
        grammar_for_calls(HERMES, TOOLS, ["nothing"], controls=controls)
    with pytest.raises(RequestError, match="no tools are given"):
        grammar_for_calls(HERMES, {}, controls=controls)
    with pytest.raises(RequestError, match="tools: bad: parameters"):
        grammar_for_calls(TAGGED, {"bad": {"properties": 3}}, controls=controls)
    unsupported = grammar_for_calls(HERMES, {"bad": {"not": {}}}, controls=controls)
    with pytest.raises(RequestError, match="not: not supported"):
        grammars().constraint(unsupported)


def test_tools_as_openai_writes_them() -> None:
    written = [
        {"type": "function", "function": {"name": "a", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "b"}},
    ]
    assert tool_schemas(written) == {"a": WEATHER, "b": {}}


def test_too_many_tools_are_refused_before_all_are_written() -> None:
    tools = {f"tool {number}": WEATHER for number in range(100_000)}
    with pytest.raises(RequestError, match="more than 262,144 bytes of schemas"):
        grammar_for_calls(HERMES, tools, controls={})
    chosen = [f"tool {number}" for number in range(100_000)]
    with pytest.raises(RequestError, match="more than 262,144 bytes of schemas"):
        grammar_for_calls(HERMES, tools, chosen, controls={})

"""Schemas and grammars from strangers: whatever they are, they compile or are refused, in bounded time and memory."""

import json
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everwarm.errors import RequestError
from everwarm.structured import grammar
from everwarm.structured.grammar import Grammar
from everwarm.structured.grammars import Grammars
from everwarm.structured.schema import DEEPEST, is_quick
from everwarm.text.tokenizer import Tokenizer
from golden.token_digests import read

Schema = dict[str, Any]


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    grammars = Grammars(Tokenizer.from_metadata(read("qwen2.5").metadata))
    yield grammars
    grammars.close()


def follow(grammars: Grammars, what: Grammar, tokens: int = 12) -> str:
    """Compile it and say some tokens that it allows; what was wrong, if anything."""
    draw = random.Random(1)
    try:
        constraint = grammars.constraint(what)()
        for _ in range(tokens):
            mask = constraint.mask()
            if mask is None:
                break
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            constraint.advance(int(draw.choice(allowed)))
    except RequestError as error:
        return told(error)
    return ""


def told(error: RequestError) -> str:
    message = str(error)
    assert "\n" not in message
    assert len(message) < 600
    return message


def nested(levels: int, key: str = "items") -> Schema:
    schema: Schema = {"type": "string"}
    for _ in range(levels):
        schema = {"properties": {"a": schema}} if key == "properties" else {key: [schema] if key == "anyOf" else schema}
    return schema


TOO_DEEP = f"deeper than {DEEPEST}"
REFUSED: dict[str, tuple[Any, str]] = {
    "deep items": (nested(60), TOO_DEEP),
    "deeper than Python's stack": (nested(100_000), TOO_DEEP),
    "deep properties": (nested(40, "properties"), TOO_DEEP),
    "deep anyOf": (nested(30, "anyOf"), TOO_DEEP),
    "deep as text": ("[" * 100_000, "not JSON"),
    "many values": ({"enum": list(range(60_000))}, "more than 50,000 values"),
    "many bytes": ({"enum": ["x" * 1000 + str(number) for number in range(300)]}, "bytes of JSON"),
    "many properties": ({"properties": {f"p{number}": {} for number in range(1001)}}, "1,001 properties"),
    "a long number": ({"const": 10**5000}, "1,024"),
    "not a number": ({"maximum": float("inf")}, "inf: not a number"),
    "lone surrogate": ({"const": "\ud800"}, "schema"),
    "patterns that are intersected": ({"allOf": [{"pattern": f".*{n}.*"} for n in range(20)]}, "takes more than 3 s"),
    "a reference to nothing": ({"$ref": "#/$defs/none"}, "schema"),
    "a reference to the network": ({"$ref": "http://127.0.0.1:1/x.json"}, "only references inside"),
    "a reference to a file": ({"$ref": "file:///etc/passwd"}, "only references inside"),
    "allOf that is no list": ({"allOf": 5, "not": {"type": "string"}}, "schema"),
    "properties that are a list": ({"properties": [1]}, "schema"),
    "a pattern that is no text": ({"pattern": 5}, "schema"),
    "back reference": ({"pattern": r"(a)\1"}, "schema"),
}
EITHER: dict[str, Any] = {
    "itself": {"$ref": "#"},
    "a circle": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "never ends": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}},
    },
    "long texts": {"type": "string", "minLength": 10**6, "maxLength": 10**9},
    "long lists": {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}},
    "a long enum": {"enum": [f"value {number}" for number in range(9_000)]},
    "a long pattern": {"pattern": "|".join(f"abc{number}def" for number in range(15_000))},
    "states that double": {"pattern": "(a|b)*a(a|b){30}"},
    "repeated repetitions": {"pattern": "((a{1,100}){1,100}){1,100}"},
    "small numbers": {"type": "number", "minimum": 1e-300, "maximum": 1e300},
    "a large divisor": {"type": "integer", "multipleOf": 1_000_003},
    "intersected choices": {"allOf": [{"anyOf": [{"minimum": n}, {"maximum": -n}]} for n in range(14)]},
    "intersected objects": {
        "allOf": [
            {"anyOf": [{"properties": {f"a{n}": {"type": kind}}} for kind in ("string", "integer")]} for n in range(12)
        ]
    },
    "a name that is a rule": {"properties": {"start: %json {": {}, '"': {}, "\n%llguidance {}": {}}},
    "unicode": {"const": "\u0000\u001f\U0010ffff\u202e"},
    "options": {"x-guidance": {"lenient": True, "whitespace_pattern": ".*"}, "type": "string"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(grammars: Grammars, name: str) -> None:
    schema, message = REFUSED[name]
    try:
        found = follow(grammars, grammar.json_schema(schema))
    except RequestError as error:
        found = told(error)
    assert message in found
    assert follow(grammars, grammar.json_schema({"const": 1})) == ""  # and the next one is compiled


@pytest.mark.parametrize("name", EITHER)
def test_compiled_or_refused(grammars: Grammars, name: str) -> None:
    try:
        made = grammar.json_schema(EITHER[name])
    except RequestError:
        return
    follow(grammars, made)
    assert follow(grammars, grammar.json_schema({"const": 1})) == ""


def test_a_schema_does_not_choose_options(grammars: Grammars) -> None:
    assert "not: not supported" in follow(
        grammars, grammar.json_schema({"not": {"const": 1}, "x-guidance": {"lenient": True}})
    )


@pytest.mark.parametrize(
    "pattern",
    [
        "(" * 5000 + "a" + ")" * 5000,
        "(.*a){500}",
        r"\p{L}{1,500}.*\p{L}{1,400}x(.*y){50}",
        "a{1,1000000}",
        "(((a*)*)*)*b",
    ],
)
def test_regular_expressions(grammars: Grammars, pattern: str) -> None:
    follow(grammars, grammar.regex(pattern))
    assert follow(grammars, grammar.regex("a|b")) == ""


@pytest.mark.parametrize(
    "text",
    [
        "root ::= " + "(" * 3000 + '"a"' + ")" * 3000,
        "root ::= root",
        'root ::= root root | "a"',
        'root ::= "a"' + ' | "b"' * 10_000,
        'root ::= ("a"*)*',
        'root ::= "a"{1000000}',
        "start: X\nX: /a/ & ~/a/",
        "start: X\n" + "\n".join(f"X{n}: X{n + 1} X{n + 1}" for n in range(30)) + '\nX: X0\nX30: "a"',
        'start: %lark { start: "a" }',
        "start: <[1000000]>",
        "\x00",
    ],
)
def test_grammars(grammars: Grammars, text: str) -> None:
    try:
        made = grammar.grammar(text)
    except RequestError:
        return
    follow(grammars, made)
    assert follow(grammars, grammar.grammar('root ::= "ab"')) == ""


NUMBERS = st.one_of(st.integers(-10, 10**6), st.floats(allow_nan=True), st.just(10**400))
TEXTS = st.one_of(
    st.text(max_size=8), st.sampled_from(["string", "object", "#", "#/$defs/a", "a", "(", "[a-z]+", "date"])
)
KEYWORDS = [
    "type", "properties", "required", "items", "enum", "const", "anyOf", "allOf", "oneOf", "$ref", "$defs",
    "minItems", "maxItems", "minLength", "maxLength", "pattern", "patternProperties", "additionalProperties", "format",
    "minimum", "maximum", "multipleOf", "not", "if", "then", "else", "dependentRequired", "dependentSchemas",
    "propertyNames", "prefixItems", "contains", "unevaluatedProperties",
    "minProperties", "maxProperties", "uniqueItems", "$id", "$anchor",
]  # fmt: skip
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(
            st.one_of(
                TEXTS,
                st.sampled_from(KEYWORDS),
            ),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=25,
)


@settings(max_examples=300, suppress_health_check=list(HealthCheck))
@given(VALUES)
def test_whatever_is_sent_as_a_schema(grammars: Grammars, value: Any) -> None:
    try:
        made = grammar.json_schema(value)
    except RequestError as error:
        told(error)
        return
    follow(grammars, made, tokens=6)


def test_what_is_called_quick() -> None:
    plain = {"type": "object", "properties": {"a": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "A"}}}
    assert is_quick(plain)
    assert is_quick(json.loads(json.dumps(plain)) | {"$defs": {"x": {"enum": list(range(100))}}, "required": ["a"]})
    for slow in (
        {"pattern": "a"},
        {"allOf": [plain]},
        {"anyOf": [plain], "type": "object"},
        {"properties": {"a": {"patternProperties": {"a": True}}}},
        {"enum": list(range(3000))},
        {"maxLength": 10**6},
        nested(25),
        {"properties": []},
        {"anyOf": {}},
    ):
        assert not is_quick(slow), slow


@pytest.mark.parametrize("with_signal", [signal.SIGALRM, signal.SIGKILL])
def test_a_process_that_has_ended_is_started_again(grammars: Grammars, with_signal: signal.Signals) -> None:
    """It ends by itself when it was idle for long; or somebody ends it."""
    trial = grammars._trial
    assert trial.error_of('start: "a"') == ""
    first = trial._process
    assert first is not None
    first.send_signal(with_signal)
    first.wait()
    assert trial.error_of('start: "b"') == ""
    assert trial._process is not first
    trial.close()
    assert trial._process is None
    assert trial.error_of('start: "c" nothing') != ""

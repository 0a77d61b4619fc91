"""What an answer may be, as a text that llguidance compiles: a JSON schema, a regular expression, choices, a grammar.

Everything is checked and bounded here: what comes out has a limited size and depth, and numbers are finite.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from everwarm.errors import RequestError
from everwarm.structured.schema import check_schema, is_quick
from everwarm.structured.simplify import simplified

MOST_SCHEMA_BYTES = 256 << 10
MOST_GRAMMAR_BYTES = 64 << 10
MOST_CHOICES = 10_000

WHITESPACE = r" {1,2}|\r?\n[ \t]{0,40}"
"""Between the parts of JSON: blanks, or a new line that is indented. Without a limit a small model may write blanks
until its tokens are used up.
"""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer may be. Equal texts are compiled once."""

    text: str  # in llguidance's variant of Lark
    name: str  # what the caller calls it, for messages
    quick: bool = False  # known to compile quickly
    is_json: bool = False  # the text is one rule, of JSON under a schema


def json_schema(schema: object, name: str = "schema") -> Grammar:
    """Answers that are JSON and valid under a schema. Raises RequestError, which calls the schema `name`."""
    return Grammar(f"start: {schema_rule(schema, name)}", name, is_quick(schema), is_json=True)


def json_object(name: str = "response_format") -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"}, name)


def schema_rule(schema: object, name: str, *, lenient: bool = False) -> str:
    """A schema as a part of a rule. If it is `lenient`, keywords that are not supported bind nothing."""
    if isinstance(schema, str):
        schema = _parsed(schema, name)
    check_schema(schema, name)
    if schema is False:
        raise RequestError(f"{name}: false: no answer could be valid")
    if not isinstance(schema, dict):
        schema = {}
    schema = simplified(schema)
    options = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    text = json.dumps(schema | {"x-guidance": options}, allow_nan=False)
    if len(text) > MOST_SCHEMA_BYTES:
        raise RequestError(f"{name}: {len(text):,} bytes of JSON, the limit is {MOST_SCHEMA_BYTES:,}")
    return f"%json {text}"


def regex(pattern: object, name: str = "regex") -> Grammar:
    """Answers that a regular expression matches as a whole."""
    pattern = _text(pattern, name)
    return Grammar(f"start: ANSWER\nANSWER: /{regex_to_lark(pattern, use_ascii='d')}/", name)


def choice(choices: object, name: str = "choice") -> Grammar:
    """One of several texts."""
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not choices:
        raise RequestError(f"{name}: expected a list of texts")
    if len(choices) > MOST_CHOICES:
        raise RequestError(f"{name}: {len(choices):,} texts, the limit is {MOST_CHOICES:,}")
    if not all(isinstance(text, str) and text for text in choices):
        raise RequestError(f"{name}: expected texts, none of them empty")
    return Grammar("start: " + " | ".join(literal(_text(text, name)) for text in choices), name)


def grammar(text: object, name: str = "grammar") -> Grammar:
    """Answers that a grammar derives: GBNF as in llama.cpp, or Lark as in llguidance."""
    text = _text(text, name)
    try:
        lark = any_to_lark(text)
    except Exception as error:  # a converter of another project: it raises what it likes
        raise RequestError(f"{name}: neither GBNF nor Lark: {str(error)[:200]}") from None
    return Grammar(lark, name)


def literal(text: str) -> str:
    """A text as a part of a rule."""
    return json.dumps(text, ensure_ascii=False)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{name}: expected a text that is not empty")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{name}: not valid Unicode") from None
    if size > MOST_GRAMMAR_BYTES:
        raise RequestError(f"{name}: {size:,} bytes, the limit is {MOST_GRAMMAR_BYTES:,}")
    return value


def _parsed(text: str, name: str) -> Any:
    if len(text) > MOST_SCHEMA_BYTES:
        raise RequestError(f"{name}: {len(text):,} characters, the limit is {MOST_SCHEMA_BYTES:,}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name}: not JSON: {error}") from None

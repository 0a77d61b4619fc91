"""Values that are written as plain text, with nothing that tells a text from a number: the tool's schema decides."""

import json
from collections.abc import Mapping
from typing import Any

from everwarm.text.tool_calls.json_reader import decoded
from everwarm.text.tool_calls.python_text import literal_as_json
from everwarm.text.tool_calls.reader import NotACall

_KINDS: dict[type, tuple[str, ...]] = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
    str: (),
}


def only_text(schema: Any) -> bool:
    """Whether the value can be nothing but a text, so that it can be passed on as it comes."""
    return kinds(schema) == {"string"}


def kinds(schema: Any) -> set[str]:
    """The types that a schema allows, as far as it says; none if it says nothing, or nothing that makes sense."""
    if not isinstance(schema, Mapping):
        return set()
    type_ = schema.get("type")
    found = {kind for kind in (type_ if isinstance(type_, list) else [type_]) if isinstance(kind, str)}
    for name in ("anyOf", "oneOf"):
        others = schema.get(name)
        for other in others if isinstance(others, list) else ():
            found |= kinds(other)
    if not found and isinstance(schema.get("enum"), list) and all(isinstance(one, str) for one in schema["enum"]):
        found = {"string"}
    return found


def as_json(text: str, schema: Any) -> str:
    """The value as JSON: what it says, where the schema allows that; else a text."""
    allowed = kinds(schema)
    if allowed != {"string"}:
        stripped = text.strip()
        for written in (stripped, literal_as_json(stripped)):  # some templates show values as Python does
            try:
                fitting = _KINDS[type(decoded(written))]
            except NotACall:
                continue
            if fitting and (not allowed or allowed.intersection(fitting)):
                return written
    return json.dumps(text, ensure_ascii=False)

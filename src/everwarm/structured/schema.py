"""JSON schemas from strangers: what is refused at once, and what is known to compile quickly."""

import math
from collections.abc import Iterator
from typing import Any

from everwarm.errors import RequestError

DEEPEST = 48
"""Levels of JSON. Compilers of schemas are recursive."""
MOST_VALUES = 50_000
"""Values of JSON in a schema."""
MOST_PROPERTIES = 1000
"""Of one object. A mask takes milliseconds if more of them may come next."""

_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly", "writeOnly"}
)
_QUICK_KEYS = _ANNOTATIONS | {
    "type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf", "$ref", "$defs",
    "definitions", "prefixItems", "minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "format",
}  # fmt: skip
_ALONE = frozenset({"anyOf", "$ref"})
"""With other keywords beside them schemas have to be intersected, which may take long."""
_QUICK_VALUES = 2000
_QUICK_DEPTH = 20
_QUICK_NUMBER = 100_000


def check_schema(schema: object, name: str) -> None:
    """Raise RequestError for what is no schema, or too deep or large to look at."""
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{name}: expected a JSON schema, found {type(schema).__name__}")
    for count, (value, depth) in enumerate(_values(schema)):
        if depth > DEEPEST:
            raise RequestError(f"{name}: nested deeper than {DEEPEST} levels; use $defs and $ref")
        if count > MOST_VALUES:
            raise RequestError(f"{name}: more than {MOST_VALUES:,} values in it")
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"{name}: {value}: not a number of JSON")
        if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 1024:
            raise RequestError(f"{name}: a number of {value.bit_length():,} bits, the limit is 1,024")
        if isinstance(value, dict):
            _check_object(value, name)
        elif not isinstance(value, str | int | float | list | tuple | None):
            raise RequestError(f"{name}: {type(value).__name__}: not a value of JSON")


def is_quick(schema: object) -> bool:
    """Whether a schema that was checked is of a kind that always compiles in milliseconds."""
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    for count, (value, depth) in enumerate(_values(schema)):
        if count > _QUICK_VALUES or depth > _QUICK_DEPTH:
            return False
        if isinstance(value, int | float) and not -_QUICK_NUMBER <= value <= _QUICK_NUMBER:
            return False
    return _is_plain(schema)


def _is_plain(schema: object) -> bool:
    if not isinstance(schema, dict):
        return isinstance(schema, bool)
    keys = schema.keys()
    if not keys <= _QUICK_KEYS or (keys & _ALONE and len(keys - _ANNOTATIONS - {"$defs", "definitions"}) > 1):
        return False
    return all(map(_is_plain, _subschemas(schema)))


def _subschemas(schema: dict[str, Any]) -> Iterator[object]:
    for name in ("properties", "$defs", "definitions"):
        if name in schema:
            yield from schema[name].values() if isinstance(schema[name], dict) else (None,)
    for name in ("anyOf", "prefixItems"):
        if name in schema:
            yield from schema[name] if isinstance(schema[name], list) else (None,)
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield schema[name]


def _check_object(value: dict[str, Any], name: str) -> None:
    for key in value:
        if not isinstance(key, str):
            raise RequestError(f"{name}: {key!r}: keys must be texts")
    properties = value.get("properties")
    if isinstance(properties, dict) and len(properties) > MOST_PROPERTIES:
        raise RequestError(f"{name}: {len(properties):,} properties in one object, the limit is {MOST_PROPERTIES:,}")


def _values(schema: object) -> Iterator[tuple[object, int]]:
    """Every value in it, with its depth. Not recursive: it may be deeper than Python's stack."""
    open_: list[tuple[object, int]] = [(schema, 0)]
    while open_:
        value, depth = open_.pop()
        yield value, depth
        if isinstance(value, dict):
            open_ += [(one, depth + 1) for one in value.values()]
        elif isinstance(value, list | tuple):
            open_ += [(one, depth + 1) for one in value]

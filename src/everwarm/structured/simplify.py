"""JSON schemas as llguidance supports them: some keywords that it lacks are written with others that mean the same.

What can't be written so stays as it is, and is refused by name when it is compiled.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

Schema = dict[str, Any]

FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)  # fmt: skip
"""Formats that are enforced. All others say something about a text, as in JSON Schema itself, and bind nothing."""

_COUNTS = (
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "minContains",
    "maxContains",
)
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS_OF_SCHEMAS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE_SCHEMA = (
    "items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames", "unevaluatedItems",
    "unevaluatedProperties",
)  # fmt: skip
_IN_PLACE = frozenset(
    {"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas"}
)
"""Keywords that apply other schemas to the same value."""
_TYPES = ("null", "boolean", "number", "string", "array", "object")


def simplified(schema: Schema) -> Schema:
    """An equal schema. Its depth must have been checked."""
    return _without_own_address(_simplified(schema))


def _simplified(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    new: Schema = {}
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, dict):
            new[key] = {name: _simplified(one) for name, one in value.items()}
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            new[key] = [_simplified(one) for one in value]
        elif key in _ONE_SCHEMA:
            new[key] = _simplified(value)
        elif key in _COUNTS and isinstance(value, float) and value.is_integer():
            new[key] = int(value)
        else:
            new[key] = value
    for step in (_formats, _without_effect, _unevaluated, _property_names, _negation, _dependencies):
        step(new)
    return new


def _formats(schema: Schema) -> None:
    if isinstance(schema.get("format"), str) and schema["format"] not in FORMATS:
        del schema["format"]


def _without_effect(schema: Schema) -> None:
    """Keywords that say nothing without others."""
    if "if" not in schema or not {"then", "else"} & schema.keys():
        for name in ("if", "then", "else"):
            schema.pop(name, None)
    elif isinstance(schema["if"], bool):
        taken = schema.get("then" if schema["if"] else "else", True)
        for name in ("if", "then", "else"):
            schema.pop(name, None)
        _also(schema, taken)
    contains_nothing = schema.get("minContains") == 0 and not {"maxContains", "unevaluatedItems"} & schema.keys()
    if "contains" not in schema or contains_nothing:
        for name in ("contains", "minContains", "maxContains"):
            schema.pop(name, None)
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]


def _unevaluated(schema: Schema) -> None:
    """Without keywords that apply other schemas, what is not evaluated is what is additional."""
    for name, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if name not in schema:
            continue
        if schema[name] is True or plain in schema:
            del schema[name]  # nothing is left unevaluated, or all that is may be there
        elif not _IN_PLACE & schema.keys() and not (plain == "items" and "contains" in schema):
            schema[plain] = schema.pop(name)


def _property_names(schema: Schema) -> None:
    names = schema.get("propertyNames")
    if names is True or names == {}:
        del schema["propertyNames"]
    elif names is False:
        del schema["propertyNames"]
        _also(schema, {"maxProperties": 0})
    elif (
        isinstance(names, dict)
        and names.keys() <= {"pattern", "type"}
        and names.get("type", "string") == "string"
        and isinstance(names.get("pattern"), str)
        and not {"properties", "patternProperties", "additionalProperties", "required"} & schema.keys()
    ):
        del schema["propertyNames"]
        schema |= {"patternProperties": {names["pattern"]: True}, "additionalProperties": False}


def _negation(schema: Schema) -> None:
    """`not` of a type is all other types."""
    negated = schema.get("not")
    if negated is False:
        del schema["not"]
    elif isinstance(negated, dict) and negated.keys() == {"type"}:
        types = [negated["type"]] if isinstance(negated["type"], str) else negated["type"]
        if isinstance(types, list) and all(isinstance(one, str) and one in _TYPES for one in types):
            del schema["not"]
            _also(schema, {"type": [one for one in _TYPES if one not in types]})


def _dependencies(schema: Schema) -> None:
    """If a property is there, so are others; or a schema holds: either it is not there, or all of that."""
    for name, then in (("dependentRequired", _required), ("dependentSchemas", _as_it_is)):
        dependencies = schema.get(name)
        if isinstance(dependencies, dict):
            del schema[name]
            for key, value in dependencies.items():
                there: Schema = {"allOf": [{"required": [key]}, then(value)]}
                _also(schema, {"anyOf": [{"properties": {key: False}}, there]})


def _required(names: Any) -> Any:
    return {"required": names}


def _as_it_is(schema: Any) -> Any:
    return schema


def _also(schema: Schema, other: Any) -> None:
    """Another schema must hold, too."""
    if other is not True and other != {}:
        known = schema.get("allOf", [])
        schema["allOf"] = [*(known if isinstance(known, list) else [known]), other]


def _without_own_address(schema: Schema) -> Schema:
    """References to the schema's own address are references inside it."""
    address = schema.get("$id")
    if not isinstance(address, str):
        return schema
    own = re.escape(address.removesuffix("#"))

    def local(value: Any) -> Any:
        if isinstance(value, dict):
            new = {key: local(one) for key, one in value.items()}
            if isinstance(new.get("$ref"), str):
                new["$ref"] = re.sub(f"^{own}(?=#|$)", "", new["$ref"]) or "#"
            return new
        return [local(one) for one in value] if isinstance(value, list) else value

    rest = {key: local(value) for key, value in schema.items() if key != "$id"}
    others = _count(rest, lambda one: isinstance(one.get("$id"), str) or _is_elsewhere(one.get("$ref")))
    return schema if others else rest


def _is_elsewhere(reference: Any) -> bool:
    return isinstance(reference, str) and not reference.startswith("#")


def _count(value: Any, test: Callable[[Mapping[str, Any]], bool]) -> int:
    if isinstance(value, dict):
        return test(value) + sum(_count(one, test) for one in value.values())
    return sum(_count(one, test) for one in value) if isinstance(value, list) else 0

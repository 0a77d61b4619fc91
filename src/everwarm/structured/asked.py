"""The one grammar that is asked for, under whatever name an API has for it."""

from collections.abc import Callable

from everwarm.errors import RequestError
from everwarm.structured.grammar import Grammar, choice, grammar, json_object, json_schema, regex

MAKERS: dict[str, Callable[[object, str], Grammar]] = {
    "schema": json_schema,
    "regex": regex,
    "grammar": grammar,
    "choice": choice,
    "guided_json": json_schema,
    "guided_regex": regex,
    "guided_grammar": grammar,
    "guided_choice": choice,
    "json_schema": json_schema,
}
"""By the names of our own arguments, of vLLM's fields and of llama.cpp's."""


def asked_grammar(**given: object) -> Grammar | None:
    """The grammar among these arguments, of which only one may be there. Raises RequestError."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise RequestError(f"{' and '.join(names)}: an answer can follow only one of them")
    return MAKERS[names[0]](given[names[0]], names[0]) if names else None


def response_format(given: object, name: str = "response_format") -> Grammar | None:
    """OpenAI's `response_format`, Anthropic's `output_config.format`. Raises RequestError."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise RequestError(f"{name}: expected an object with a type")
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":  # llama.cpp and others take a schema here, too
        schema = given.get("schema")
        return json_object(name) if schema is None else json_schema(schema, f"{name}.schema")
    if kind != "json_schema":
        raise RequestError(f"{name}: type {str(kind)[:50]!r}: only text, json_object and json_schema are supported")
    inner = given.get("json_schema")
    if inner is None and "schema" in given:  # Anthropic, and OpenAI's Responses
        return json_schema(given["schema"], f"{name}.schema")
    if not isinstance(inner, dict):
        raise RequestError(f"{name}.json_schema: expected an object with a schema")
    schema = inner.get("schema")
    return json_object(name) if schema is None else json_schema(schema, f"{name}.json_schema.schema")

"""The JSON Schema Test Suite: what a schema forbids can't be said, and whatever is said to its end is valid.

`benchmarks/structured.py suite` is the long form, with any model.
"""

import json
import lzma
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import everwarm
from everwarm.errors import RequestError
from everwarm.structured import grammar
from everwarm.structured.constraint import GrammarConstraint
from everwarm.structured.grammars import Grammars
from everwarm.text.tokenizer import Tokenizer
from golden.token_digests import read
from short_and_long import short_and_long
from tiny import Tiny

SUITE = Path(__file__).parent.parent / "golden" / "json_schemas.json.xz"


@cache
def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(lzma.decompress(SUITE.read_bytes()))
    return found


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_metadata(read("qwen2.5").metadata)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    grammars = Grammars(tokenizer)
    yield grammars
    grammars.close()


def accepts(constraint: GrammarConstraint, tokenizer: Tokenizer, text: str) -> bool:
    for id_ in tokenizer.encode(text):
        if not may(constraint, id_):
            return False
        constraint.advance(id_)
    return any(may(constraint, id_) for id_ in tokenizer.eog_ids)


def may(constraint: GrammarConstraint, id_: int) -> bool:
    mask = constraint.mask()
    assert mask is not None
    return bool(mask[id_ // 32] >> id_ % 32 & 1)


def test_nothing_invalid_can_be_said_and_nearly_all_that_is_valid_can(grammars: Grammars, tokenizer: Tokenizer) -> None:
    supported, unsayable, valid = 0, [], 0
    for case in cases():
        try:
            make = grammars.constraint(grammar.json_schema(case["schema"]))
        except RequestError:
            continue
        supported += 1
        for data, is_valid in case["tests"]:
            text = json.dumps(data, ensure_ascii=False)
            accepted = accepts(make(), tokenizer, text)
            assert is_valid or not accepted, (case["title"], text)
            valid += is_valid
            if is_valid and not accepted:
                unsayable.append((case["title"], text))
    assert supported >= 230
    # Another order of properties, 1.0 for 1, texts that are not of the format that they are called.
    assert len(unsayable) < 0.06 * valid, unsayable


def test_a_schema_that_is_refused_is_refused_by_name(grammars: Grammars) -> None:
    others = ("$ref", "false", "regexes", "multipleOf", "$dynamicAnchor")  # the last is in the schema of schemas
    unnamed = []
    for case in cases():
        try:
            grammars.constraint(grammar.json_schema(case["schema"]))
        except RequestError as error:
            message, written = str(error).removeprefix("schema: "), json.dumps(case["schema"])
            named = all(f'"{word}"' in written for word in message.partition(":")[0].split(", "))
            if not named and not any(word in message for word in others):
                unnamed.append((case["title"], message))
    assert not unnamed


def is_valid(schema: Any, text: str) -> bool:
    """The validator computes with floats, for which 8030.4445 is no multiple of 0.0001: so decimals count, too."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    return Draft202012Validator(schema).is_valid(json.loads(text)) or Draft202012Validator(exact).is_valid(
        json.loads(text, parse_float=Decimal)
    )


@pytest.mark.slow
@short_and_long("seeds", 1, 3)
def test_whatever_is_said_to_its_end_is_valid(tmp_path: Path, seeds: int) -> None:
    Tiny(context=256, type="Q4_0").write(tmp_path / "tiny.gguf")
    ended = 0
    with everwarm.load(tmp_path / "tiny.gguf") as llm:
        for case in cases():
            for seed in range(seeds):
                options = {"max_tokens": 60, "temperature": 1.0, "seed": seed, "cache": False}
                try:
                    completion = llm.generate("x", schema=case["schema"], **options)
                except RequestError:
                    break
                if completion.finish_reason == "stop":
                    ended += 1
                    assert is_valid(case["schema"], completion.text), (case["title"], completion.text)
    assert ended > 60 * seeds

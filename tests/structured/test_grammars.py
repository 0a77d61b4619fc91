"""Grammars over real vocabularies: which tokens may follow, against definitions written out."""

import codecs
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from everwarm.engine.processors import only_token
from everwarm.errors import RequestError
from everwarm.structured import grammar
from everwarm.structured.constraint import GrammarConstraint
from everwarm.structured.grammar import Grammar
from everwarm.structured.grammars import MOST_KEPT, Grammars
from everwarm.text.tokenizer import Tokenizer
from golden.token_digests import families, read

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ANYTHING = Grammar("start: ANY\nANY: /(.|\\n)*/", "anything")


@cache
def tokenizer(family: str) -> Tokenizer:
    return Tokenizer.from_metadata(read(family).metadata)


@cache
def grammars(family: str) -> Grammars:
    return Grammars(tokenizer(family))


@pytest.fixture(scope="module", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    for family in families():
        grammars(family).close()


def new(what: Grammar, family: str = "qwen2.5") -> GrammarConstraint:
    return grammars(family).constraint(what)()


def allowed(constraint: GrammarConstraint, family: str = "qwen2.5") -> set[int]:
    mask = constraint.mask()
    assert mask is not None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert not bits[tokenizer(family).vocab_size :].any()
    return set(np.flatnonzero(bits).tolist())


def follows(constraint: GrammarConstraint, ids: list[int], family: str = "qwen2.5") -> bool:
    for id_ in ids:
        if id_ not in allowed(constraint, family):
            return False
        constraint.advance(id_)
    return True


def begins_text(piece: bytes) -> bool:
    """Whether bytes may begin a text in UTF-8."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(piece)
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("family", families())
def test_where_any_text_may_follow_all_tokens_of_text_may_and_no_control_token(family: str) -> None:
    ours = tokenizer(family)
    control = set(ours.special_tokens.values())
    texts = {
        id_
        for id_ in range(ours.vocab_size)
        if id_ not in control and (piece := ours.token_bytes(id_)) and begins_text(piece)
    }
    assert allowed(new(ANYTHING, family), family) == texts | ours.eog_ids


@pytest.mark.parametrize("family", families())
def test_json_may_be_spelt_as_the_tokenizer_spells_it_and_byte_by_byte(family: str) -> None:
    ours = tokenizer(family)
    text = json.dumps({"name": 'Zoë "Ω" \U0001f600 日本 {x}', "age": 12}, ensure_ascii=False)
    ids = ours.encode(text, continuing=True)
    assert b"".join(map(ours.token_bytes, ids)).decode() == text
    single = {ours.token_bytes(id_): id_ for id_ in range(ours.vocab_size) if len(ours.token_bytes(id_)) == 1}
    spellings = [ids]
    if all(bytes([byte]) in single for byte in text.encode()):
        spellings.append([single[bytes([byte])] for byte in text.encode()])
    for spelling in spellings:
        constraint = new(grammar.json_schema(PERSON), family)
        assert follows(constraint, spelling, family)
        assert allowed(constraint, family) == ours.eog_ids


def test_several_families_have_byte_tokens() -> None:
    assert {"llama-spm", "gemma3", "qwen2.5"} <= set(families())


def test_a_control_token_may_follow_only_where_the_grammar_names_it() -> None:
    ours = tokenizer("qwen2.5")
    start = ours.special_tokens["<|im_start|>"]
    named = new(grammar.grammar(f'start: "a" <[{start}]> "b"'))
    assert follows(named, ours.encode("a"))
    assert allowed(named) == {start}
    spelt = new(grammar.regex("a<\\|im_start\\|>b"))
    assert follows(spelt, ours.encode("a"))
    assert start not in allowed(spelt)


def test_nothing_is_tokenised_ahead() -> None:
    """Of a text that is certain, every token that begins it may come next."""
    ours = tokenizer("qwen2.5")
    for what in (
        grammar.regex("information system"),
        grammar.choice(["information system"]),
        grammar.grammar('root ::= "information system"'),
        grammar.grammar('%llguidance {"no_forcing": false}\nstart: "information system"'),
    ):
        expected = {
            id_
            for id_ in range(ours.vocab_size)
            if (piece := ours.token_bytes(id_)) and b"information system".startswith(piece)
        }
        assert len(expected) > 1
        assert allowed(new(what)) == expected


def test_tokens_that_are_taken_back_leave_no_trace() -> None:
    ours = tokenizer("qwen2.5")
    ids = [*ours.encode('{"name": "x", "age": 1}'), min(ours.eog_ids)]
    constraint = new(grammar.json_schema(PERSON))
    masks = []
    for id_ in ids:
        masks.append(allowed(constraint))
        constraint.advance(id_)
    assert constraint.mask() is None  # after the end nothing is constrained
    constraint.advance(5)
    constraint.rollback(2)
    assert allowed(constraint) == masks.pop()
    while masks:
        constraint.rollback(1)
        assert allowed(constraint) == masks.pop()
    assert follows(constraint, ids[:-1])
    constraint.rollback(len(ids) - 1)
    assert allowed(constraint) == allowed(new(grammar.json_schema(PERSON)))


def test_choices_of_one_request_do_not_disturb_each_other() -> None:
    ours = tokenizer("qwen2.5")
    make = grammars("qwen2.5").constraint(grammar.json_schema(PERSON))
    first, second = make(), make()
    assert follows(first, ours.encode('{"name": "x"'))
    assert follows(second, ours.encode('{"name": "y", "age": 7}'))
    assert allowed(second) == ours.eog_ids


def test_the_one_token_that_a_mask_leaves() -> None:
    mask = np.zeros(4, np.uint32)
    assert only_token(mask) is None
    mask[2] = 1 << 31
    assert only_token(mask) == 95
    mask[2] |= 1
    assert only_token(mask) is None
    mask[2], mask[3] = 1, 1
    assert only_token(mask) is None


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"not": {"const": 1}, "if": {}, "then": {}}, "if, not, then: not supported"),
        ({"type": "object", "properties": {"a": {"uniqueItems": True}}}, "uniqueItems: not supported"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, "oneOf: supported only where"),
        ({"type": "strange"}, "strange"),
        ({"$ref": "https://example.com/schema.json"}, "example.com"),
        (False, "no answer could be valid"),
        ([], "expected a JSON schema"),
        ({"minimum": float("nan")}, "nan: not a number"),
        ({"enum": [{1}]}, "set: not a value of JSON"),
        ("{", "not JSON"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused_by_name(schema: object, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        new(grammar.json_schema(schema, "response_format"))
    assert str(caught.value).startswith("response_format: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "source", "message"),
    [
        (grammar.regex, "(", "not a regular expression: unclosed group"),
        (grammar.regex, "(?=a)b", "look-around"),
        (grammar.regex, "", "expected a text"),
        (grammar.regex, "\ud800", "not valid Unicode"),
        (grammar.grammar, "root ::= other", "'other' not found"),
        (grammar.grammar, "no grammar", "neither GBNF nor Lark"),
        (grammar.choice, [], "expected a list"),
        (grammar.choice, ["a", 1], "expected texts"),
        (grammar.choice, "ab", "expected a list"),
    ],
)
def test_what_is_no_grammar_is_refused(make: object, source: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        new(make(source))  # type: ignore[operator]


def test_a_grammar_is_compiled_once_and_the_least_used_is_forgotten() -> None:
    mine = Grammars(tokenizer("gpt-2"))
    compiled: list[str] = []
    original = mine._compile
    mine._compile = lambda what: (compiled.append(what.text), original(what))[1]  # type: ignore[method-assign]
    first = grammar.json_schema({"const": "first"})
    for number in range(MOST_KEPT + 10):
        mine.constraint(first)
        mine.constraint(grammar.json_schema({"const": number}))
    assert len(compiled) == len(set(compiled)) == MOST_KEPT + 11
    mine.constraint(grammar.json_schema({"const": 0}))
    assert len(compiled) == MOST_KEPT + 12
    mine.close()


def test_a_vocabulary_without_an_end_is_refused() -> None:
    class Endless:
        vocab_size = 1
        eog_ids: frozenset[int] = frozenset()
        special_tokens: dict[str, int] = {}  # noqa: RUF012

        def token_bytes(self, id_: int, *, special: bool = False) -> bytes:
            return b"a"

    with pytest.raises(RequestError, match="no end token"):
        Grammars(Endless()).constraint(grammar.json_object())


@pytest.mark.model
def test_the_demo_models_vocabulary(smollm2_path: Path) -> None:
    from everwarm.weights.gguf.file import GGUFFile

    with GGUFFile(smollm2_path) as file:
        ours = Tokenizer.from_metadata(file.metadata)
    constraint = Grammars(ours).constraint(grammar.json_schema(PERSON))()
    ids = ours.encode('{"name": "Ada", "age": 36}')
    for id_ in ids:
        mask = constraint.mask()
        assert mask is not None
        assert mask[id_ // 32] >> id_ % 32 & 1
        constraint.advance(id_)

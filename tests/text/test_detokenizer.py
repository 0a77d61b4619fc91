"""Text as it comes: whole characters only, and in the end the same as all at once."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.text.detokenizer import Detokenizer
from everwarm.text.tokenizer import Tokenizer
from golden.token_digests import read
from text.nasty import nasty_strings

BPE = Tokenizer.from_metadata(read("gpt-2").metadata)
WITH_SPACE_PREFIX = Tokenizer.from_metadata(read("llama-spm").metadata)
GEMMA = Tokenizer.from_metadata(read("gemma3").metadata)
ALL = [BPE, WITH_SPACE_PREFIX, GEMMA]


def stream(detokenizer: Detokenizer, ids: Iterable[int]) -> list[str]:
    return [*(detokenizer.push(id_) for id_ in ids), detokenizer.flush()]


@pytest.mark.parametrize("tokenizer", ALL)
def test_parts_of_nasty_strings_add_up(tokenizer: Tokenizer) -> None:
    for text in nasty_strings():
        ids = tokenizer.encode(text, special=True)
        assert "".join(stream(Detokenizer(tokenizer), ids)) == tokenizer.decode(ids)
        assert "".join(stream(Detokenizer(tokenizer, special=True), ids)) == tokenizer.decode(ids, special=True)


@given(st.sampled_from(ALL), st.data(), st.booleans())
def test_parts_of_any_tokens_add_up(tokenizer: Tokenizer, data: st.DataObject, special: bool) -> None:
    """Any tokens: bytes in an order that is no UTF-8 at all."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    parts = stream(Detokenizer(tokenizer, special=special), ids)
    assert "".join(parts) == tokenizer.decode(ids, special=special)


@given(st.lists(st.integers(0, 255), max_size=12))
def test_bytes_that_are_no_utf8_are_replaced_as_at_once(values: list[int]) -> None:
    ids = [WITH_SPACE_PREFIX.encode("x")[0], *(byte_token(value) for value in values)]
    assert "".join(stream(Detokenizer(WITH_SPACE_PREFIX), ids)[1:]) == bytes(values).decode("utf-8", "replace")


def test_a_character_comes_with_its_last_byte() -> None:
    ids = [byte_token(byte) for byte in "\U0001f600".encode()]
    assert stream(Detokenizer(WITH_SPACE_PREFIX), ids) == ["", "", "", "\U0001f600", ""]


def test_flush_replaces_half_a_character() -> None:
    ids = [byte_token(byte) for byte in "\U0001f600".encode()[:2]]
    assert stream(Detokenizer(WITH_SPACE_PREFIX), ids) == ["", "", "\ufffd"]


def test_only_the_very_first_token_loses_its_space() -> None:
    ids = WITH_SPACE_PREFIX.encode("the the")
    assert [WITH_SPACE_PREFIX.token_text(id_) for id_ in ids] == ["\u2581the", "\u2581the"]
    assert stream(Detokenizer(WITH_SPACE_PREFIX), ids) == ["the", " the", ""]
    after_bos = [WITH_SPACE_PREFIX.bos_id or 0, *ids]
    assert stream(Detokenizer(WITH_SPACE_PREFIX), after_bos) == ["", " the", " the", ""]


def test_continued_text_keeps_its_space() -> None:
    ids = WITH_SPACE_PREFIX.encode("the")
    assert stream(Detokenizer(WITH_SPACE_PREFIX, continuing=True), ids) == [" the", ""]
    assert stream(Detokenizer(GEMMA), GEMMA.encode(" the")) == [" the", ""]


def byte_token(value: int) -> int:
    return next(i for i in range(WITH_SPACE_PREFIX.vocab_size) if WITH_SPACE_PREFIX.token_text(i) == f"<0x{value:02X}>")

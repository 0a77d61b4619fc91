"""SentencePiece: the fast encoder against a slow one that does what the definition says, and its special rules.

Equality with llama.cpp is tested with the other vocabularies, in `test_tokenizer.py`.
"""

import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.errors import TokenizerError
from everwarm.text.tokenizer import Tokenizer
from golden.token_digests import read
from text.nasty import nasty_strings

SPACE = "\u2581"
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def metadata(pieces: dict[str, float], **more: Any) -> dict[str, Any]:
    """A vocabulary of `<unk>`, `<s>`, `</s>`, the bytes, and these pieces with their scores."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *BYTES, *pieces],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces)],
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def tokenizer(pieces: dict[str, float], **more: Any) -> Tokenizer:
    return Tokenizer.from_metadata(metadata(pieces, **more))


def texts(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(id_) for id_ in tokenizer.encode(text)]


def by_definition(pieces: dict[str, float], text: str) -> list[str]:
    """Merge the best pair of neighbours, the leftmost of equals, until none is a piece; spell the rest in bytes."""
    symbols = list(text.replace(" ", SPACE))
    while True:
        neighbours = enumerate(pairwise(symbols))
        pairs = [(-pieces[left + right], at) for at, (left, right) in neighbours if left + right in pieces]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    return [
        part
        for symbol in symbols
        for part in ([symbol] if symbol in pieces else [BYTES[byte] for byte in symbol.encode()])
    ]


alphabet = st.sampled_from(["a", "b", " ", SPACE, ">", "\u00e9"])
vocabularies = st.dictionaries(
    st.text(alphabet, min_size=1, max_size=4), st.sampled_from([-3.0, -2.0, -1.0, 0.0]), max_size=24
)


@given(vocabularies, st.text(alphabet, max_size=24))
def test_merges_as_defined(pieces: dict[str, float], text: str) -> None:
    pieces = {piece.replace(" ", SPACE): score for piece, score in pieces.items()}
    assert texts(tokenizer(pieces, add_space_prefix=False), text) == by_definition(pieces, text)


@pytest.mark.parametrize("family", ["llama-spm", "gemma3"])
def test_cutting_into_words_changes_nothing(family: str) -> None:
    """Real vocabularies, and texts without user-defined tokens, against the definition."""
    data = read(family).metadata | {"tokenizer.ggml.add_space_prefix": False}
    tokens, types, scores = (data[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "scores"))
    pieces = {token: score for token, kind, score in zip(tokens, types, scores, strict=True) if kind == 1}
    ours = Tokenizer.from_metadata(data)
    user_defined = [token for token, kind in zip(tokens, types, strict=True) if kind == 4]
    for text in nasty_strings()[::7]:
        if len(text) < 60 and not any(token in text for token in user_defined):
            assert texts(ours, text) == by_definition(pieces, text)


def test_space_is_put_before_text_that_begins_or_follows_a_special_token() -> None:
    ours = tokenizer({SPACE: -9.0, "a": -9.0, SPACE + "a": -1.0}, bos_token_id=1, eos_token_id=2)
    assert [ours.token_text(id_) for id_ in ours.encode("a<s>a", special=True)] == [SPACE + "a", "<s>", SPACE + "a"]
    assert texts(ours, "aa") == [SPACE + "a", "a"]
    assert ours.encode("a", continuing=True) == ours.encode("aa")[1:]
    assert ours.decode(ours.encode("a")) == "a"


def test_no_space_is_put_if_the_file_says_so() -> None:
    assert texts(tokenizer({"a": -1.0, SPACE: -9.0}, add_space_prefix=False), "a") == ["a"]


def test_unknown_characters_are_spelled_in_bytes() -> None:
    assert texts(tokenizer({SPACE: -1.0}), "\u00e9") == [SPACE, "<0xC3>", "<0xA9>"]


def test_without_bytes_they_are_the_unknown_token() -> None:
    data = metadata({SPACE: -1.0})
    kept = [i for i, kind in enumerate(data["tokenizer.ggml.token_type"]) if kind != 6]
    for key in ("tokens", "token_type", "scores"):
        data[f"tokenizer.ggml.{key}"] = [data[f"tokenizer.ggml.{key}"][i] for i in kept]
    assert texts(Tokenizer.from_metadata(data), "\u00e9") == [SPACE, "<unk>", "<unk>"]
    data["tokenizer.ggml.token_type"][0] = 1
    with pytest.raises(TokenizerError, match="no token for byte 0x00"):
        Tokenizer.from_metadata(data)


def test_text_does_not_become_a_control_token_by_merging() -> None:
    ours = tokenizer({"</": -1.0, "s>": -1.0, "<": -5.0, "/": -5.0, "s": -5.0, ">": -5.0}, add_space_prefix=False)
    assert texts(ours, "</s>") == ["</", "s>"]


def test_user_defined_tokens_are_found_in_raw_text() -> None:
    data = metadata({SPACE: -1.0, "a": -2.0, "  ": 0.0, "<b>": 0.0}, add_space_prefix=False)
    data["tokenizer.ggml.token_type"][-2:] = [4, 4]
    assert texts(Tokenizer.from_metadata(data), "a   <b>a") == ["a", "  ", SPACE, "<b>", "a"]


def test_scores_are_needed() -> None:
    data = metadata({})
    del data["tokenizer.ggml.scores"]
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.scores is missing"):
        Tokenizer.from_metadata(data)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["the " * 25_000, "a" * 100_000, " " * 100_000, "\n" * 100_000, "\u4e2d" * 33_000])
def test_long_texts_take_less_than_seconds(text: str) -> None:
    ours = Tokenizer.from_metadata(read("gemma3").metadata)
    begin = time.process_time()
    assert ours.decode(ours.encode(text)) == text
    assert time.process_time() - begin < 3

"""The least number of tokens is never more than the number of tokens; slices of a text are the text."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.text import bpe, pace
from everwarm.text.least import LeastTokens
from everwarm.text.tokenizer import Tokenizer
from everwarm.types import Segment
from everwarm.weights.gguf.file import GGUFFile
from golden.token_digests import families, read
from text.nasty import nasty_strings
from text.test_history import byte_pairs, sentencepiece

TOKENIZERS = [*families(), "sentencepiece", "swallowing", "byte pairs"]


@cache
def tokenizer(name: str) -> Tokenizer:
    if name == "sentencepiece":
        return sentencepiece()
    if name == "swallowing":
        return sentencepiece("phi-3")
    if name == "byte pairs":
        return byte_pairs()
    return Tokenizer.from_metadata(read(name).metadata)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_makes_no_fewer(name: str) -> None:
    ours = tokenizer(name)
    special = Segment(next(iter(ours.special_tokens)), special=True)
    prompts = [[Segment(text)] for text in nasty_strings()]
    prompts += [[special, Segment(text), special, Segment(" \n" + text)] for text in nasty_strings()]
    for segments in prompts:
        assert ours.least_tokens(segments) <= len(ours.encode(segments)), repr(segments)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_a_model_can_not_spell_it_with_fewer(name: str, data: st.DataObject) -> None:
    """Its tokens need not be those of the tokenizer, nor whole characters."""
    ours = tokenizer(name)
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=40))
    plain = [number for number in ids if number not in ours.special_tokens.values()]
    assert ours.least_tokens([Segment(ours.decode(plain))]) <= len(plain)


@pytest.mark.model
def test_it_is_near_the_truth_for_what_people_write(smollm2_path: Path) -> None:
    with GGUFFile(smollm2_path) as file:
        ours = Tokenizer.from_metadata(file.metadata)
    text = "It was a bright cold day in April, and the clocks were striking thirteen. " * 100
    assert len(ours.encode(text)) / 8 < ours.least_tokens([Segment(text)])
    assert ours.least_tokens([Segment("x" * 100_000)]) > 2_000


def test_the_weights() -> None:
    least = LeastTokens([b"a", b"b", b"aaaa", b"cd"], dropped={ord("b")})
    assert least.of(b"aaaaaaaa") == pytest.approx(2)
    assert least.of(b"bbb") == 0
    assert least.of(b"cdcd") == pytest.approx(2)
    assert least.of(b"e") == 0  # no token has it


@pytest.mark.parametrize("name", TOKENIZERS)
def test_slices_change_no_id(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = tokenizer(name)
    texts = nasty_strings()[::10]
    whole = [ours.encode(text) for text in texts]
    monkeypatch.setattr(pace, "SLICE", 2)
    assert [ours.encode(text) for text in texts] == whole


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_is_left_out_comes_after_the_limit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "SLICE", 2)
    ours = tokenizer(name)
    for text in nasty_strings()[::10]:
        segments = [Segment(text), Segment(next(iter(ours.special_tokens)), special=True), Segment(text)]
        whole = ours.encode(segments)
        for most in (0, 3, len(whole) - 1, len(whole)):
            some = ours.encode(segments, most=most)
            assert some == whole[: len(some)]
            assert len(some) == len(whole) or len(some) > most


@pytest.mark.parametrize("name", [name for name in TOKENIZERS if name not in ("sentencepiece", "swallowing")])
def test_long_words_have_the_same_ids_beside_other_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = tokenizer(name)
    texts = [*nasty_strings()[::10], *(part * 1000 for part in ("x", "#", "ab", " ", "é", "\u4e00", "0"))]
    whole = [ours.encode(text) for text in texts]
    monkeypatch.setattr(bpe, "_LONG_WORD", 1)
    monkeypatch.setattr(bpe, "_LONGEST_REMEMBERED", 0)
    assert [ours.encode(text) for text in texts] == whole

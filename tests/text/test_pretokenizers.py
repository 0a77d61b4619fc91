"""Words: cut as llama.cpp cuts them, in all of Unicode, without losing a character or much time."""

import time
import unicodedata
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.errors import TokenizerError
from everwarm.text import words
from everwarm.text.bpe import BytePairEncoder
from everwarm.text.pretokenizers import PRETOKENIZERS, Pattern, PreTokenizer, pretokenizer
from everwarm.text.vocabulary import read_vocabulary
from everwarm.text.words import WordSplitter
from golden.pairs import pairs_vocabulary
from golden.token_digests import digests, read
from text.nasty import nasty_strings

SPLITTERS = {pre.patterns: WordSplitter(pre.patterns) for pre in PRETOKENIZERS.values()}


@cache
def encoder_of_words(ignore_merges: bool) -> BytePairEncoder:
    """On the vocabulary in which cuts are visible; it makes none itself."""
    metadata = pairs_vocabulary()
    vocabulary = read_vocabulary(metadata, default_ids={})
    return BytePairEncoder(vocabulary, metadata["tokenizer.ggml.merges"], PreTokenizer((), ignore_merges))


@cache
def ids_of_nasty_strings(patterns: tuple[Pattern, ...], ignore_merges: bool) -> list[str]:
    split, encode = SPLITTERS[patterns].split, encoder_of_words(ignore_merges).encode
    return digests([id_ for word in split(text) for ids in encode(word) for id_ in ids] for text in nasty_strings())


def test_golden_file_knows_every_name() -> None:
    assert read("pretokenizers").digests.keys() == PRETOKENIZERS.keys()


@pytest.mark.parametrize("name", PRETOKENIZERS)
def test_cuts_like_llama_cpp(name: str) -> None:
    pre = pretokenizer(name)
    ours = ids_of_nasty_strings(pre.patterns, pre.ignore_merges)
    expected = read("pretokenizers").digests[name]
    wrong = [text for text, a, b in zip(nasty_strings(), ours, expected, strict=True) if a != b]
    assert not wrong, f"{len(wrong)} of {len(expected)} strings, the first is {wrong[0]!a}"


@pytest.mark.parametrize("name", PRETOKENIZERS)
def test_adds_bos_like_llama_cpp(name: str) -> None:
    assert pretokenizer(name).add_bos == (name in read("pretokenizers").facts["add_bos"])


def test_unknown_name_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(TokenizerError, match=r"'gpt-7' is not supported \(known: a\.x-4\.0, .*, youtu\)"):
        pretokenizer("gpt-7")


@given(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from(list(SPLITTERS)))
def test_words_are_not_empty_and_add_up_to_the_text(text: str, patterns: tuple[Pattern, ...]) -> None:
    parts = SPLITTERS[patterns].split(text)
    assert "".join(parts) == text
    assert all(parts)


def test_classes_are_those_of_unicodedata() -> None:
    """Where both know a code point: Python's Unicode may be older or newer than the table."""
    table = words._class_of_code()
    letters = {code: letter for letter, code in words._CODES.items()}
    letters |= {0x86: "L", 0x87: "-"}
    differing = []
    for code in range(0x80, 0x110000):
        category = unicodedata.category(chr(code))
        expected = category[0] if category[0] in "NLPMS" else "-"
        found = letters[int(table[code])]
        if found not in ("W", expected) and category != "Cn" and found != "-":
            differing.append(f"U+{code:04X} {category} {found}")
    assert differing == []
    spaces = [chr(code) for code in range(0x80, 0x110000) if table[code] == words._SPACE]
    assert spaces == [chr(code) for code in range(0x80, 0x110000) if chr(code).isspace()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit", [" ", "\t ", "\n", "1", "a", "A", "\u0301", "\u4e2d", "!", "'", "a ", "1\u0661", "\u3000"]
)
def test_time_grows_no_faster_than_the_text(unit: str) -> None:
    """Quadratic patterns, easily written, would take minutes here."""
    text = unit * (60_000 // len(unit)) + "x"
    for splitter in SPLITTERS.values():
        begin = time.process_time()
        splitter.split(text)
        assert time.process_time() - begin < 2

"""Special tokens in text: longest first, wherever they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.text.specials import SpecialFinder

texts = st.text("ab<> ", max_size=30) | st.text("ab", max_size=60)
tokens = st.lists(st.text("ab<> ", min_size=1, max_size=4), unique=True, max_size=8) | st.lists(
    st.text("ab", min_size=1, max_size=9), unique=True, max_size=20
)


def by_definition(text: str, ids: dict[str, int]) -> list[str | int]:
    """Each token in turn takes its occurrences out of what is left, the longest first."""
    pieces: list[str | int] = [text]
    for token in sorted(ids, key=lambda token: (-len(token), ids[token])):
        parts: list[str | int] = []
        for piece in pieces:
            if isinstance(piece, int):
                parts.append(piece)
                continue
            for number, part in enumerate(piece.split(token)):
                parts += [ids[token], part] if number else [part]
        pieces = parts
    return [piece for piece in pieces if piece != ""]


@given(texts, tokens)
def test_partition_as_defined(text: str, tokens: list[str]) -> None:
    ids = {token: id_ for id_, token in enumerate(tokens)}
    assert SpecialFinder(ids).partition(text) == by_definition(text, ids)


def test_longer_token_further_right_wins() -> None:
    assert SpecialFinder({"ab": 0, "bcd": 1}).partition("abcd") == ["a", 1]


def test_white_space_after_a_token_is_swallowed_if_asked_for() -> None:
    finder = SpecialFinder({"<a>": 0, "<b>": 1}, strip_after={0})
    assert finder.partition("<a> \n x<b> y<a>\t") == [0, "x", 1, " y", 0]


def test_length_counts_in_bytes() -> None:
    assert SpecialFinder({"abc": 0, "c\u4e2d": 1}).partition("abc\u4e2d") == ["ab", 1]


def test_nothing_to_find() -> None:
    assert SpecialFinder({}).partition("text") == ["text"]
    assert SpecialFinder({"a": 0}).partition("") == []


class CountingText(str):
    """Counts how often a part of it is looked at."""

    looks = 0

    def __getitem__(self, place: object) -> str:
        CountingText.looks += 1
        return str.__getitem__(self, place)  # type: ignore[index]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ({f"<unused{i}>": i for i in range(6000)} | {" " * n: 6000 + n for n in range(2, 32)}, "<unused7> x <y  "),
        ({f"<unused{i}>": i for i in range(6000)}, "".join(f"<unused{i}>" for i in range(0, 6000, 7))),
        ({"a" * n: n for n in range(1, 257)}, "a" * 200 + "b"),
        ({"a" * n: n for n in range(1, 257)}, "aab"),
        ({"ab" * n: n for n in range(1, 128)} | {"ab" * n + "c": 128 + n for n in range(1, 127)}, "ab" * 90 + "d"),
    ],
)
def test_work_grows_with_the_text_and_not_with_the_tokens(ids: dict[str, int], text: str) -> None:
    finder = SpecialFinder(ids)
    long = CountingText(text * (20_000 // len(text)))
    CountingText.looks = 0
    finder.partition(long)
    assert CountingText.looks < 6 * len(long)

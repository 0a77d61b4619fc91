"""The longest of many texts at a place, and texts that begin with another."""

from hypothesis import given
from hypothesis import strategies as st

from everwarm.text.prefixes import Prefixes

words = st.text("ab", min_size=1, max_size=8)


@given(st.sets(words, max_size=30), st.text("ab", max_size=12), st.integers(0, 12), st.integers(0, 12))
def test_the_longest_that_stands_there(texts: set[str], text: str, at: int, end: int) -> None:
    index = Prefixes(texts)
    fitting = [each for each in texts if text.startswith(each, at)]
    assert index.longest_at(text, at) == max(fitting, key=len, default=None)
    fitting = [each for each in fitting if at + len(each) <= end]
    assert index.longest_at(text, at, end) == max(fitting, key=len, default=None)


@given(st.sets(words, max_size=30), words)
def test_begins_and_contains(texts: set[str], part: str) -> None:
    index = Prefixes(texts)
    assert index.begins(part) == any(text.startswith(part) and text != part for text in texts)
    assert (part in index) == (part in texts)


@given(st.sets(words, max_size=30), st.text("abc", max_size=20))
def test_no_place_is_left_out(texts: set[str], text: str) -> None:
    places = list(Prefixes(texts).places(text))
    assert places == sorted(set(places))
    assert set(places) >= {at for at in range(len(text)) if text.startswith(tuple(texts), at)}


def test_long_chains_are_climbed_by_leaps() -> None:
    """Each text begins with all shorter ones, and the longest is the nearest to what is looked for."""
    index = Prefixes("a" * size for size in range(1, 257))
    for size in range(1, 256):
        assert index.longest_at("a" * size + "b", 0) == "a" * size

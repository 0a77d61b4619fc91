"""The index that drafts are read from, against a search that looks at every place."""

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.kernels._native import Suffixes

SEPARATOR, CONTEXT, LONGEST = -1, 16, 64
ONE, ALL, HALF, FEW = range(4)

few_tokens = st.lists(st.integers(0, 2), max_size=60)
some_tokens = st.lists(st.integers(SEPARATOR, 4), max_size=60)


def index_of(tokens: list[int], most: int = 4096) -> Suffixes:
    index = Suffixes(most)
    index.extend(np.array(tokens, np.int32))
    return index


def naive_draft(stored: list[int], tail: list[int], most: int) -> tuple[int, list[int], list[int]]:
    """What `Suffixes.draft` says, by looking at every place."""

    def match(at: int) -> int:
        same = 0
        while same < min(len(tail), at + 1, LONGEST) and stored[at - same] == tail[-1 - same] != SEPARATOR:
            same += 1
        return same

    matches = {at: match(at) for at in range(len(stored) - 1) if stored[at + 1] != SEPARATOR}
    longest = max(matches.values(), default=0)
    if longest < 2:
        return 0, [], []
    needed = min(len(tail), CONTEXT)
    goes_on = stored[-needed:] == tail[-needed:] and SEPARATOR not in tail[-needed:]
    places = [at for at in sorted(matches, reverse=True) if matches[at] == longest]
    draft: list[int] = []
    support: list[int] = []
    while places and len(draft) < most:
        text = stored + draft if goes_on else stored
        places = [at + 1 for at in places]
        following = {at: text[at] for at in places if at < len(text) and text[at] != SEPARATOR}
        votes = Counter(following.values())
        if not votes:
            break
        best, count = votes.most_common(1)[0]  # the first of equals, which is at the latest place
        total = votes.total()
        draft.append(best)
        support.append(ONE if total == 1 else ALL if count == total else HALF if 2 * count >= total else FEW)
        places = [at for at in places if following.get(at) == best]
    return longest, draft, support


@given(stored=some_tokens, tail=some_tokens.filter(bool), most=st.integers(1, 20))
def test_a_draft_follows_the_longest_match(stored: list[int], tail: list[int], most: int) -> None:
    assert index_of(stored).draft(tail, most) == naive_draft(stored, tail, most)


@given(text=few_tokens.filter(bool), most=st.integers(1, 20))
def test_a_text_goes_on_as_it_did_before(text: list[int], most: int) -> None:
    assert index_of(text).draft(text, most) == naive_draft(text, text, most)


@given(tokens=some_tokens, begin=st.integers(0, 60))
def test_it_does_not_matter_whether_tokens_come_one_by_one(tokens: list[int], begin: int) -> None:
    index = index_of(tokens[:begin])
    for token in tokens[begin:]:
        index.append(token)
    assert index.tokens == len(tokens)
    if tokens:
        assert index.draft(tokens, 9) == index_of(tokens).draft(tokens, 9)


def test_long_texts_grow_the_index_and_the_oldest_tokens_are_forgotten() -> None:
    draw = random.Random(1)
    text = [draw.randrange(50_000) for _ in range(5000)]
    index = index_of(text, most=2048)
    assert index.tokens == 2048
    assert index.size_bytes == 2048 * Suffixes.bytes_per_token
    assert index.draft(text[2890:2900], 5) == (0, [], [])
    assert index.draft(text[4000:4100], 5) == (LONGEST, text[4100:4105], [ONE] * 5)
    assert index_of(text, most=8192).draft(text[2990:3000], 5) == (10, text[3000:3005], [ONE] * 5)


def test_a_text_that_repeats_itself_is_drafted_beyond_its_end() -> None:
    text = [7, 8, 9] * 10
    assert index_of(text).draft(text, 7) == (27, [7, 8, 9, 7, 8, 9, 7], [ONE] * 7)


def test_in_a_long_chain_the_latest_places_are_looked_at() -> None:
    text = [1, 2, 3] * 400 + [5, 1, 2, 4] * 70 + [1, 2]
    match, draft, _ = index_of(text).draft([9, 1, 2], 1)
    assert (match, draft) == (2, [4])


@given(parts=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 150), st.integers(20, 200)), max_size=6))
def test_what_is_absorbed_is_found_and_what_was_there_is_not_stored_again(
    parts: list[tuple[int, int, int]],
) -> None:
    draw = random.Random(2)
    sources = [[draw.randrange(1000) for _ in range(200)] for _ in range(4)]
    text = [token for source, begin, end in parts for token in sources[source][begin : begin + end]]
    index = Suffixes(8192)
    array = np.array(text, np.int32)
    index.absorb(array, 0, len(array))
    for at in range(2, len(text)):
        match, draft, _ = index.draft(text[max(0, at - 40) : at], 1)
        assert match >= min(at, CONTEXT)
        assert draft
    stored = index.tokens
    index.absorb(array, 0, len(array))
    if len(text) >= LONGEST:
        assert index.tokens - stored <= (LONGEST + 3 * CONTEXT) * len(parts)
    assert stored <= len(text) + (3 * CONTEXT + 2) * (len(parts) + 1)


def test_agents_that_say_the_same_share_its_memory() -> None:
    draw = random.Random(3)
    system = [draw.randrange(1000) for _ in range(700)]
    index = Suffixes(8192)
    for number in range(8):
        own = [1000 + number] * 3 + [draw.randrange(1000) for _ in range(20)]
        array = np.array(system + own, np.int32)
        index.absorb(array, 0, len(array))
        assert index.draft(system + own[:5], 4)[1] == own[5:9]
    assert index.tokens < 700 + 8 * (2 * CONTEXT + 25)


def test_arguments_are_checked() -> None:
    index = Suffixes(1024)
    assert index.draft([], 3) == (0, [], [])
    with pytest.raises(ValueError, match="2 to 9 of 3 tokens"):
        index.absorb(np.zeros(3, np.int32), 2, 9)

"""What is kept to explain an agent's last request: bounded, durable, and never in the way of its history."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.kv.last_turn import MOST_BEFORE, MOST_KEPT, LastTurn, Left, Reuse
from everwarm.kv.manifest import pack_text, unpack_text
from everwarm.types import Run
from kv.fake import CAPACITY, compute, open_store, talk

RUNS = (Run("Hello", False, 2),)
HISTORY = list(range(100, 150))

REUSES = st.builds(Reuse, st.integers(0, 1 << 40), st.integers(0, 1 << 40))
LEFTS = st.builds(lambda begin, more, text: Left(begin + more, begin, text), *[st.integers(0, 99)] * 2, st.text())
TURNS = st.builds(
    LastTurn, REUSES, st.text(), st.text(), st.lists(st.text()).map(tuple), st.none() | LEFTS, st.none() | REUSES
)


@given(TURNS)
def test_what_is_kept_is_read_again(turn: LastTurn) -> None:
    assert unpack_text(pack_text(RUNS, None, None, turn)).last == turn


def test_a_text_without_it_is_read_as_before() -> None:
    assert unpack_text(pack_text(RUNS, None)).last is None


KEPT: dict[str, Any] = LastTurn(Reuse(1, 0), "", "").as_json()


@pytest.mark.parametrize("said", [None, 3, "x", [], {}, {"prompt_tokens": 1}])
def test_what_is_something_else_is_ignored(said: Any) -> None:
    assert LastTurn.from_json(said) is None


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_tokens": "many"}, {"prompt_tokens": float("inf")}, {"rules": 3}, {"left": [1]}, {"left": [1, 2, ""]},
        {"left": [5, -1, ""]}, {"first": "xy"}, {"first": 7},
    ],
)  # fmt: skip
def test_what_it_should_not_say_is_ignored(change: dict[str, Any]) -> None:
    assert LastTurn.from_json(KEPT) is not None
    assert LastTurn.from_json(KEPT | change) is None


def test_only_so_much_of_the_old_text_is_kept() -> None:
    runs = [Run("a" * 1000, False, 1), Run("b" * (2 * MOST_KEPT), False, 1)]
    left = Left.of(runs, 1000)
    assert (left.at, left.begin, len(left.text)) == (1000, 1000 - MOST_BEFORE, MOST_BEFORE + MOST_KEPT)
    assert left.text.startswith("a" * MOST_BEFORE + "b")


def test_a_turn_says_what_it_reused_and_what_its_agent_reused_first(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    talk(store, "alice", HISTORY)
    talk(store, "alice", [*HISTORY, 1, 2])
    with store.open_turn("alice", CAPACITY) as turn:
        changed = [*HISTORY[:29], 5, *HISTORY[30:]]
        turn.acquire(changed, diverged_at_char=7)
        compute(turn, changed)
        turn.commit((Run("changed", False, len(changed)),))
    store.close()
    store = open_store(tmp_path)
    last = store.manifest(store.find("alice")).last
    spelt = " ".join(map(str, [*HISTORY, 1, 2]))
    assert last == LastTurn(
        Reuse(50, 29), "diverged", "diverged at token 29, character 7", (), Left(7, 0, spelt), Reuse(50, 0)
    )
    store.fork("alice", "bob")
    assert store.manifest(store.find("bob")).last == last
    assert np.array_equal(store.manifest(store.find("bob")).tokens, changed)
    store.close()

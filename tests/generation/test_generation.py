"""Iterators that are not read to their end: closing them never waits, whoever closes them."""

import gc
import threading
from pathlib import Path
from typing import Any

import pytest

import everwarm
from everwarm.llm import LLM
from tiny import Tiny
from waiting_until import wait_until


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("EVERWARM_HOME", str(tmp_path / "home"))
    path = tmp_path / "tiny.gguf"
    Tiny(context=2048).write(path)
    with everwarm.load(path, warm="on") as llm:
        yield llm


def begun(llm: LLM, agent: str | None) -> Any:
    events = llm.stream("hello", max_tokens=1900, ignore_eos=True, agent=agent, cache=agent is not None)
    next(events)
    return events


class Cycle:
    """Only the garbage collector can find that nobody wants it any more."""

    def __init__(self, events: Any) -> None:
        self.events, self.me = events, self


@pytest.mark.parametrize("agent", ["alice", None])
def test_an_iterator_that_is_closed_on_the_engines_own_thread_does_not_hang_it(llm: LLM, agent: str | None) -> None:
    events = begun(llm, agent)
    closed = threading.Event()

    def close() -> None:
        events.close()
        closed.set()

    llm.engine.call_soon(close)
    assert closed.wait(60)
    assert llm.generate("and another", max_tokens=3, ignore_eos=True, agent=agent).tokens


def test_an_iterator_in_a_cycle_is_collected_on_the_engines_thread(llm: LLM) -> None:
    gc.disable()
    try:
        for number in range(5):
            Cycle(begun(llm, f"agent {number}"))
        collected = threading.Event()

        def collect() -> None:
            gc.collect()
            collected.set()

        llm.engine.call_soon(collect)
        assert collected.wait(60)
    finally:
        gc.enable()
    for number in range(5):  # their turns are free
        assert llm.generate("again", max_tokens=3, ignore_eos=True, agent=f"agent {number}").receipt.committed
    assert llm.engine.running == 0


def test_an_iterator_is_closed_by_a_thread_that_holds_every_lock(llm: LLM) -> None:
    events = begun(llm, "alice")
    with llm.agents.index.lock:
        locked = threading.Thread(target=events.close)
        locked.start()
        locked.join(60)
        assert not locked.is_alive()
    assert llm.generate("again", max_tokens=3, ignore_eos=True, agent="alice").receipt.committed


def test_memory_and_turn_of_an_abandoned_answer_are_given_back(llm: LLM) -> None:
    for agent in ("alice", None):
        events = begun(llm, agent)
        events.close()
        assert llm.generate("another", max_tokens=3, ignore_eos=True, agent=agent or "bob").receipt.committed
    llm.agents.flush()
    tree = [node.block for node in llm.agents.index.tree.nodes.values() if node.block is not None]
    assert llm.agents.index.pool.in_use == len(tree)


def test_an_answer_that_is_over_but_was_not_read_to_its_end_is_given_back(llm: LLM) -> None:
    events = llm.stream("hello", max_tokens=5, ignore_eos=True, agent="alice")
    next(events)
    wait_until(lambda: not llm.engine.running)
    events.close()  # the engine has let go of it before
    assert llm.generate("again", max_tokens=3, ignore_eos=True, agent="alice").receipt.committed


def test_a_model_that_nobody_closed_is_closed_when_it_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERWARM_HOME", str(tmp_path / "home"))
    path = tmp_path / "tiny.gguf"
    Tiny().write(path)
    llm = everwarm.load(path, warm="on")
    store = llm.agents
    assert not store.read_only
    del llm
    gc.collect()
    wait_until(lambda: store.shared._lease is None)

"""Iterators that are not read to their end: closing them never waits, whoever closes them."""

import gc
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

import everwarm
from everwarm.errors import CancelledError, EverwarmError
from everwarm.llm import LLM, Generation
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


@pytest.mark.parametrize("asked", [{}, {"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}])
def test_a_model_that_nobody_closed_is_closed_when_it_is_collected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    """Whatever it was asked: the engine's thread, and the one that computes ahead, may remember their last request."""
    monkeypatch.setenv("EVERWARM_HOME", str(tmp_path / "home"))
    path = tmp_path / "tiny.gguf"
    Tiny().write(path)
    llm = everwarm.load(path, warm="on")
    store = llm.agents
    assert not store.read_only
    if asked:
        llm.generate(**asked, max_tokens=3, agent="alice")
    del llm
    gc.collect()
    wait_until(lambda: store.shared._lease is None)


def failure(generation: Generation) -> BaseException:
    """What ends it."""
    try:
        list(generation.events())
    except EverwarmError as error:
        return error
    raise AssertionError("it came to its end")


def test_a_prompt_that_was_given_up_is_on_disk_as_far_as_it_was_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that gives up and tries again makes progress, also if the server was killed in between."""
    monkeypatch.setenv("EVERWARM_HOME", str(tmp_path / "home"))
    path = tmp_path / "tiny.gguf"
    Tiny(context=2048).write(path)
    words = "word " * 390
    with everwarm.load(path, warm="on") as llm:
        llm.engine._scheduler._most_rows = 64
        generation = llm.start(words, max_tokens=1)
        failed: list[BaseException] = []
        reader = threading.Thread(target=lambda: failed.append(failure(generation)))
        reader.start()
        wait_until(lambda: (found := generation.progress) is not None and found.computed >= 256)
        generation.cancel()
        reader.join()
        assert isinstance(failed[0], CancelledError)
        llm.agents.flush()
        shutil.copytree(tmp_path / "home", tmp_path / "killed")  # what is on disk at this moment
    monkeypatch.setenv("EVERWARM_HOME", str(tmp_path / "killed"))
    with everwarm.load(path, warm="on") as llm:
        again = llm.generate(words, max_tokens=3)
        assert 256 <= again.cached_tokens < again.prompt_tokens
        assert again.receipt.tier == "warm"
        assert again.tokens == llm.generate(words, max_tokens=3, cache=False).tokens

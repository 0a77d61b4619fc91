"""Requests with the same prompt at the same time: a block that one has computed is not computed by the others."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import everwarm
from everwarm.engine.shared_prefill import without_repetition
from everwarm.errors import CancelledError
from everwarm.events import Event
from everwarm.llm import LLM, Generation
from tiny import Tiny
from waiting_until import wait_until

LONG = "".join(f"{number} is a number. " for number in range(40))  # 710 tokens: a byte is a token
OPTIONS: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture
def tiny_path(tmp_path: Path, home: Path) -> Path:
    Tiny(context=2048).write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


class Rows:
    """Counts the rows that a model computes."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        forward = llm.model.forward

        def counting(spans: Any) -> Any:
            self.count += sum(len(span.tokens) for span in spans)
            return forward(spans)

        monkeypatch.setattr(llm.model, "forward", counting)


@contextmanager
def held(llm: LLM, waiting: int) -> Iterator[None]:
    """The engine stands still until so many sequences wait for it."""
    llm.generate("a", max_tokens=1, cache=False)
    go = threading.Event()
    llm.engine.call_soon(lambda: go.wait(60) and None)
    try:
        yield
        wait_until(lambda: llm.engine._inbox.qsize() >= waiting)
    finally:
        go.set()


def together(llm: LLM, prompts: list[str], **options: Any) -> list[Any]:
    with ThreadPoolExecutor(len(prompts)) as threads:
        with held(llm, len(prompts)):
            asked = [threads.submit(llm.generate, prompt, **OPTIONS, **options) for prompt in prompts]
        return [one.result() for one in asked]


@pytest.mark.parametrize("count", [2, 5])
def test_a_new_prompt_that_several_ask_at_once_is_computed_once(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    with everwarm.load(tiny_path, warm="off") as llm:
        expected = llm.generate(LONG, cache=False, **OPTIONS).tokens
        rows, size = Rows(llm, monkeypatch), llm.agents.index.block_tokens
        answers = together(llm, [LONG] * count)
        assert [answer.tokens for answer in answers] == [expected] * count
        prompt = answers[0].prompt_tokens
        full = prompt // size * size
        # Each computes the end of the prompt, which fills no block, and its answer but for the last token.
        each = prompt - full + OPTIONS["max_tokens"] - 1
        assert rows.count == 1 + full + count * each
        assert sum(answer.cached_tokens for answer in answers) == (count - 1) * full
        assert all(answer.receipt.cause in ("shared", "new") for answer in answers)


def test_prompts_that_part_share_what_they_have_in_common(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [LONG + "And one." * 20, LONG + "And two." * 30]
    with everwarm.load(tiny_path, warm="off") as llm:
        expected = [llm.generate(prompt, cache=False, **OPTIONS).tokens for prompt in prompts]
        rows, size = Rows(llm, monkeypatch), llm.agents.index.block_tokens
        answers = together(llm, prompts)
        assert [answer.tokens for answer in answers] == expected
        alone = 1 + sum(answer.prompt_tokens + OPTIONS["max_tokens"] - 1 for answer in answers)
        assert rows.count == alone - len(LONG) // size * size
        assert rows.count == alone - sum(answer.cached_tokens for answer in answers)


def test_tenants_and_requests_without_a_cache_share_nothing(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with everwarm.load(tiny_path, warm="off") as llm, ThreadPoolExecutor(3) as threads:
        expected = llm.generate(LONG, cache=False, **OPTIONS).tokens
        rows = Rows(llm, monkeypatch)
        with held(llm, 3):
            kinds: list[dict[str, Any]] = [{"tenant": "a"}, {"tenant": "b"}, {"cache": False}]
            asked = [threads.submit(llm.generate, LONG, **OPTIONS, **kind) for kind in kinds]
        answers = [one.result() for one in asked]
        assert [answer.tokens for answer in answers] == [expected] * 3
        assert [answer.cached_tokens for answer in answers] == [0, 0, 0]
        assert rows.count == 1 + sum(answer.prompt_tokens + OPTIONS["max_tokens"] - 1 for answer in answers)


def test_shared_prefill_under_a_small_budget_says_the_same(tiny_path: Path) -> None:
    with everwarm.load(tiny_path, warm="off") as llm:
        block = llm.new_kv().pool.block_bytes
        expected = llm.generate(LONG, cache=False, max_tokens=200, ignore_eos=True).tokens
    with everwarm.load(tiny_path, kv_budget=20 * block) as llm, ThreadPoolExecutor(4) as threads:
        llm.agents.index._node_bytes = 0
        answers = threads.map(lambda _: llm.generate(LONG, max_tokens=200, ignore_eos=True), range(4))
        found = list(answers)
        assert [answer.tokens for answer in found] == [expected] * 4
        assert all(answer.cached_tokens < answer.prompt_tokens for answer in found)
        assert llm.agents.index.pool.in_use <= 20


def test_if_the_one_that_computes_leaves_another_goes_on(tiny_path: Path) -> None:
    with everwarm.load(tiny_path, warm="off") as llm, ThreadPoolExecutor(3) as threads:
        expected = llm.generate(LONG, cache=False, **OPTIONS).tokens
        generations = [llm.start(LONG, **OPTIONS) for _ in range(3)]
        with held(llm, 3):
            answers = [threads.submit(tokens_of, one) for one in generations]
            wait_until(lambda: llm.engine._inbox.qsize() >= 3)
            generations[0].cancel()
        assert [answer.result() for answer in answers] == [None, expected, expected]


def tokens_of(generation: Generation) -> list[int] | None:
    """None if it was cancelled."""
    try:
        return [event.token for event in generation.events() if isinstance(event, Event)]
    except CancelledError:
        return None


class Waiting:
    """What is looked at of a sequence: as its turn, too."""

    def __init__(
        self, block: object, length: int = 0, priority: int = 0, pending: int = 100, idle: bool = False
    ) -> None:
        self.pending, self.priority, self.length, self._block = pending, priority, length, block
        self.idle = idle
        self.turn = self.kv = self
        self.caught_up = 0

    def catch_up(self) -> None:
        self.caught_up += 1

    def next_block(self) -> object:
        return self._block


def test_of_those_that_compute_the_same_block_the_furthest_of_the_most_important_goes_on() -> None:
    near, far, important, other = Waiting("a"), Waiting("a", 32), Waiting("a", 8, priority=1), Waiting("b")
    alone, talking, ahead = Waiting(None), Waiting("a", 90, pending=1), Waiting("a", 80, idle=True)
    running: list[Any] = [near, alone, far, talking, other, ahead]
    assert without_repetition(running) == [alone, far, talking, other, ahead]
    assert without_repetition([*running, important]) == [  # type: ignore[list-item]
        alone, talking, other, ahead, important,
    ]  # fmt: skip
    assert (near.caught_up, far.caught_up, talking.caught_up) == (2, 2, 0)

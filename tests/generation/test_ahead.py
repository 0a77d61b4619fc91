"""Prefill ahead: what the next request will show is computed while nobody asks, and takes nothing from anybody."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

import everwarm
from everwarm.generation import ahead
from everwarm.kv.receipt import Receipt
from everwarm.llm import LLM
from everwarm.text.next_turn import common_beginning, next_conversations
from everwarm.types import Segment
from output_parsers import Says
from tiny import Tiny
from waiting_until import wait_until

END = 258
"""The token `<|im_end|>` of a tiny model."""

FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['reasoning_content'] and loop.last %}{{ '<think>' + m['reasoning_content'] + '</think>' }}{% endif %}"
    "{{ (m['content'] or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Reasoning is left out once the conversation goes on."""

ASKED = {"role": "user", "content": "What is it? " * 10}
REASONS, ANSWERS = "<think>" + "Hm. " * 20 + "</think>", "It is a long story. " * 15


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ahead") / "tiny.gguf"
    Tiny(context=4096, template=FORGETFUL).write(path)
    return path


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "SETTLE_S", 0.0)


@pytest.fixture
def load(path: Path, home: Path) -> Iterator[Callable[..., LLM]]:
    loaded: list[LLM] = []

    def make(**settings: Any) -> LLM:
        loaded.append(everwarm.load(path, **settings))
        return loaded[-1]

    yield make
    for llm in loaded:
        llm.close()


def says(llm: LLM, messages: list[Any], text: str, **options: Any) -> tuple[dict[str, Any], Receipt]:
    """The model is made to say a text."""
    ids = [*llm.tokenize(text, special=True), END]
    done = llm.generate(
        messages=messages, max_tokens=900, constraint=partial(Says, ids, llm.config.vocab_size), **options
    )
    return llm.conversation(done.receipt.agent, options.get("tenant", ""))[-1], done.receipt  # type: ignore[return-value]


def computed(llm: LLM) -> int:
    assert llm._ahead is not None
    return llm._ahead.tokens


def settled(llm: LLM) -> bool:
    found = llm._ahead
    assert found is not None
    return not found._jobs and found._sequence is None and not found._busy


WHO: list[dict[str, str]] = [{"agent": "alice"}, {"group": "g", "tenant": "t"}, {}]


@pytest.mark.parametrize("who", WHO)
def test_the_history_without_its_reasoning_is_known_when_it_comes_back(load: Any, who: dict[str, str]) -> None:
    llm = load()
    answer, _ = says(llm, [ASKED], REASONS + ANSWERS, **who)
    wait_until(lambda: computed(llm) > 0 and settled(llm))
    assert computed(llm) >= len(ANSWERS)
    messages = [ASKED, answer, {"role": "user", "content": "Go on."}]
    options = {"max_tokens": 12, "ignore_eos": True}
    found = llm.generate(messages=messages, **who, **options)
    assert found.receipt.prompt_tokens - found.cached_tokens <= len("user\nGo on.") + len("assistant\n") + 4
    assert found.tokens == llm.generate(messages=messages, cache=False, **options).tokens


def test_it_can_be_switched_off(load: Any) -> None:
    llm = load(prefill_ahead="off")
    answer, _ = says(llm, [ASKED], REASONS + ANSWERS, agent="alice")
    assert llm._ahead is None
    _, receipt = says(llm, [ASKED, answer, {"role": "user", "content": "Go on."}], "Yes.", agent="alice")
    assert receipt.prompt_tokens - receipt.cached_tokens > len(ANSWERS)


def test_what_comes_back_as_it_was_is_not_computed_again(load: Any) -> None:
    llm = load()
    says(llm, [ASKED], ANSWERS, agent="alice")
    wait_until(lambda: settled(llm))
    assert computed(llm) == 0


def test_a_request_ends_it_and_it_goes_on_later(load: Any) -> None:
    llm = load()
    llm.engine._scheduler._most_rows = 1  # so slow that it can be met
    llm.engine._scheduler._idle_rows = 1
    answer, _ = says(llm, [ASKED], REASONS + ANSWERS, agent="alice")
    assert llm._ahead is not None
    wait_until(lambda: llm._ahead._sequence is not None)
    other = [{"role": "user", "content": "And you?"}]
    options = {"max_tokens": 8, "ignore_eos": True}
    found = llm.generate(messages=other, agent="bob", **options)
    assert found.tokens == llm.generate(messages=other, cache=False, **options).tokens
    wait_until(lambda: settled(llm))
    _, receipt = says(llm, [ASKED, answer, {"role": "user", "content": "Go on."}], "Yes.", agent="alice")
    assert receipt.prompt_tokens - receipt.cached_tokens < 64


def test_it_takes_no_memory_from_anybody(load: Any) -> None:
    """The budget holds little more than the turns themselves."""
    roomy = load()
    block = roomy.agents.index.block_bytes
    roomy.close()
    llm = load(kv_budget=18 * block + 40_000, warm="off")
    says(llm, [{"role": "user", "content": "x" * 300}], "Yes.", agent="bob")
    says(llm, [ASKED], REASONS + ANSWERS, agent="alice")
    evictions = llm.agents.counters["hot_evictions"]
    wait_until(lambda: settled(llm))
    assert computed(llm) == 0
    assert llm.agents.counters["hot_evictions"] == evictions


def test_it_takes_no_disk_from_anybody(load: Any) -> None:
    llm = load()
    quota = llm.agents.shared.quota
    says(llm, [ASKED], ANSWERS, agent="alice")
    agent = llm.agents.find("alice")
    llm.agents.flush()
    with llm.agents.open_ahead(agent, 4096) as turn:
        ids = [*llm.agents.history(agent).ids[:64], *range(97, 122)]
        llm.agents.shared.quota = llm.agents.shared.used
        assert not turn.begin_ahead(ids)
        llm.agents.shared.quota = quota
        assert turn.begin_ahead(ids)


def test_an_agent_that_is_removed_meanwhile_leaves_nothing_behind(load: Any, home: Path) -> None:
    """What was said is not to be found on disk or in memory after that."""
    llm = load(warm="on")
    llm.engine._scheduler._most_rows = 1
    llm.engine._scheduler._idle_rows = 1
    says(llm, [ASKED], REASONS + ANSWERS, agent="alice")
    wait_until(lambda: llm._ahead._sequence is not None and llm._ahead._sequence.turn.kv.length > 250)
    llm.agents.delete("alice")
    wait_until(lambda: settled(llm))
    llm.agents.flush()
    assert list(home.glob("agents/*/blocks/*")) == []
    assert llm.agents.index.pool.in_use == 0
    answer, _ = says(llm, [ASKED], REASONS + ANSWERS, agent="alice")  # and it may begin anew
    wait_until(lambda: settled(llm))
    _, receipt = says(llm, [ASKED, answer, {"role": "user", "content": "Go on."}], "Yes.", agent="alice")
    assert receipt.prompt_tokens - receipt.cached_tokens < 64


def test_closing_does_not_wait_for_it(load: Any) -> None:
    llm = load()
    llm.engine._scheduler._most_rows = 1
    llm.engine._scheduler._idle_rows = 1
    says(llm, [ASKED], REASONS + ANSWERS * 3, agent="alice")
    wait_until(lambda: llm._ahead._sequence is not None)
    llm.close()


def test_what_is_certain_of_the_next_turn() -> None:
    user: Any = {"role": "user", "content": "hi"}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    one, two = next_conversations([user], {"role": "assistant", "content": None, "tool_calls": [call]})
    assert [message["role"] for message in one] == ["user", "assistant", "tool"]
    assert one[:2] == two[:2]
    assert one[2] != two[2]
    assert (
        next_conversations([user, {"role": "assistant", "content": "I"}], {"role": "assistant", "content": "x"}) == []
    )
    thought: Any = {"role": "assistant", "content": "x", "reasoning_content": "hm"}
    assert next_conversations([user], thought)[0][1] == thought
    without: Any = {"role": "assistant", "content": "x"}
    assert next_conversations([user, without, user], thought)[0][3] == without
    assert next_conversations([user, thought, user], thought)[0][3] == thought
    start, text = Segment("<s>", special=True), Segment("user\n")
    assert common_beginning([[start, text, start, Segment("a")], [start, text, start, Segment("b")]]) == [
        start,
        text,
        start,
    ]
    assert common_beginning([[text, Segment("a")], [text, Segment("b")]]) == []


def test_an_agent_that_is_removed_before_anything_is_computed_for_it_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread waits a moment before it takes a job; the only one may be gone by then."""
    monkeypatch.setattr(ahead, "SETTLE_S", 0.3)
    one = ahead.Ahead()
    job = ahead.Job("default", "ada", lambda: None, cast(Any, None))
    one.offer(cast(Any, None), job)
    one.forget(cast(Any, None), "default", "ada")
    thread = one._thread
    assert thread is not None
    thread.join(2 * ahead.SETTLE_S)
    assert thread.is_alive()
    one.close()

"""Many requests at once: the same tokens as one by one, whatever else runs, however little memory there is."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

import everwarm
from everwarm.errors import CancelledError, CapacityError
from everwarm.events import Content
from everwarm.text.output_parser import PlainText
from tiny import Tiny
from waiting_until import wait_until

PROMPTS = ["Once upon a time", "x" * 300, "The capital of France", "a", "To be or not to be, " * 12, "0123456789" * 20]


@pytest.fixture
def tiny_path(tmp_path: Path, home: Path) -> Path:
    Tiny(context=2048).write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def alone(path: Path, prompts: list[str], **options: object) -> list[list[int]]:
    with everwarm.load(path) as llm:
        return [llm.generate(prompt, cache=False, ignore_eos=True, **options).tokens for prompt in prompts]


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 7, "top_p": 0.9}])
def test_requests_at_once_say_what_they_say_alone(tiny_path: Path, options: dict[str, object]) -> None:
    prompts = PROMPTS * 4
    expected = alone(tiny_path, prompts, max_tokens=70, **options)
    with everwarm.load(tiny_path) as llm, ThreadPoolExecutor(len(prompts)) as threads:
        answers = threads.map(lambda p: llm.generate(p, max_tokens=70, ignore_eos=True, **options).tokens, prompts)
        assert list(answers) == expected


def test_when_memory_runs_out_a_sequence_goes_to_disk_and_comes_back(tiny_path: Path) -> None:
    prompts = [f"{number} tells a story" * 4 for number in range(6)]
    expected = alone(tiny_path, prompts, max_tokens=300)
    with everwarm.load(tiny_path) as llm:
        block = llm.new_kv().pool.block_bytes
    with everwarm.load(tiny_path, kv_budget=14 * block) as llm, ThreadPoolExecutor(6) as threads:
        llm.agents.index._node_bytes = 0
        answers = list(threads.map(lambda p: llm.generate(p, max_tokens=300, ignore_eos=True).tokens, prompts))
        assert llm.engine.preemptions > 0
        assert answers == expected
        assert llm.agents.index.pool.in_use <= 14


def test_one_that_can_never_fit_is_refused_and_others_go_on(tiny_path: Path) -> None:
    with everwarm.load(tiny_path) as llm:
        block = llm.new_kv().pool.block_bytes
    with everwarm.load(tiny_path, kv_budget=4 * block) as llm:
        llm.agents.index._node_bytes = 0
        with pytest.raises(CapacityError, match="--kv-budget"):
            llm.generate("y" * 1000, max_tokens=5)
        with pytest.raises(CapacityError, match="--kv-budget"):
            llm.generate("y" * 100, max_tokens=500, ignore_eos=True)
        assert len(llm.generate("abc", max_tokens=5, ignore_eos=True).tokens) == 5


def test_cancelled_from_another_thread(tiny_path: Path) -> None:
    with everwarm.load(tiny_path) as llm:
        generation = llm.start("Hello", max_tokens=1500, ignore_eos=True)
        events = generation.events()
        next(events)
        threading.Timer(0.05, generation.cancel).start()
        with pytest.raises(CancelledError):
            for _ in events:
                pass
        assert llm.engine.running == 0
        assert llm.generate("Hello", max_tokens=3).tokens


def test_a_listener_that_leaves_frees_its_memory(tiny_path: Path) -> None:
    with everwarm.load(tiny_path, warm="off") as llm:
        for number in range(200):
            events = llm.stream(f"{number} Hello" * 10, max_tokens=100, ignore_eos=True, cache=False)
            next(events)
            events.close()
        wait_until(lambda: not llm.engine.running and not llm.agents.index.pool.in_use)


def test_turns_of_one_agent_come_one_after_the_other(tiny_path: Path) -> None:
    with everwarm.load(tiny_path) as llm, ThreadPoolExecutor(6) as threads:
        answers = list(
            threads.map(lambda n: llm.generate("Hello", agent="a", max_tokens=20, ignore_eos=True), range(6))
        )
        assert len({tuple(answer.tokens) for answer in answers}) == 1
        assert sorted(answer.receipt.match for answer in answers) == ["exact"] * 5 + ["none"]
        assert llm.agents.find("a").generation == 6


def test_a_short_prompt_does_not_wait_for_a_long_one(tiny_path: Path) -> None:
    with everwarm.load(tiny_path) as llm:
        order: list[str] = []

        def ask(name: str, prompt: str) -> None:
            next(events := llm.stream(prompt, max_tokens=3, ignore_eos=True, cache=False))
            order.append(name)
            events.close()

        long = [threading.Thread(target=ask, args=(f"long {n}", "z" * 1900)) for n in range(3)]
        short = threading.Thread(target=ask, args=("short", "hi"))
        for thread in long:
            thread.start()
        time.sleep(0.02)
        short.start()
        for thread in [*long, short]:
            thread.join()
        assert order.index("short") < 3


class BrokenParser(PlainText):
    def feed(self, text: str) -> list[Content]:
        raise ZeroDivisionError

    finish = feed  # type: ignore[assignment]


def test_a_broken_request_fails_alone(tiny_path: Path) -> None:
    with everwarm.load(tiny_path) as llm:
        events = llm.stream("Hello", max_tokens=200, ignore_eos=True)
        next(events)
        generation = llm.start("Hi", max_tokens=5, parser=BrokenParser)
        with pytest.raises(ZeroDivisionError):
            list(generation.events())
        assert len(list(events)) == 200


def test_pinned_agents_make_room_when_nothing_else_can(tiny_path: Path) -> None:
    """They come back from disk; nobody waits for memory that never becomes free."""
    with everwarm.load(tiny_path) as llm:
        block = llm.new_kv().pool.block_bytes
    prompts = [f"{number} tells a story" * 20 for number in range(4)]
    expected = alone(tiny_path, prompts, max_tokens=100)
    with everwarm.load(tiny_path, kv_budget=14 * block, restore="always") as llm, ThreadPoolExecutor(4) as threads:
        llm.agents.index._node_bytes = 0
        for name in ("a", "b"):
            llm.generate(name * 380, agent=name, max_tokens=10, ignore_eos=True)
            llm.agents.pin(name)
        assert llm.agents.index.pool.in_use > 10
        answers = list(threads.map(lambda p: llm.generate(p, max_tokens=100, ignore_eos=True).tokens, prompts))
        assert answers == expected
        back = llm.generate("a" * 380 + "!", agent="a", max_tokens=5, ignore_eos=True, temperature=0.0)
        assert back.receipt is not None
        assert (back.receipt.match, back.receipt.tier) == ("diverged", "warm")


def test_choices_go_on_from_the_very_tokens_of_the_first(tiny_path: Path) -> None:
    """`zq` is one token, unless an agent has said it as two."""
    talk = [{"role": "user", "content": "Hi"}]
    with everwarm.load(tiny_path) as llm:
        ask = partial(
            llm.generate, messages=talk, max_tokens=2, temperature=9.0, logit_bias={ord("z"): 100.0, ord("q"): 100.0}
        )
        seed = next(seed for seed in range(100) if ask(seed=seed, cache=False).text == "zq")
        assert ask(seed=seed, agent="a").tokens == [ord("z"), ord("q")]
        talk += [{"role": "assistant", "content": "zq"}, {"role": "user", "content": "Go on"}]
        first = llm.start(messages=talk, agent="a", max_tokens=3, ignore_eos=True)
        other = first.another_choice(1, None)
        spoken = [[one.token for one in each.events() if isinstance(one, everwarm.Event)] for each in (first, other)]
        assert spoken[0] == spoken[1]
        assert first.receipt is not None
        assert other.receipt is not None
        assert first.receipt.match == "extended"
        assert other.receipt.tokens_digest == first.receipt.tokens_digest
        assert other.receipt.prompt_tokens == len(llm.encode_prompt(messages=talk)) + 1

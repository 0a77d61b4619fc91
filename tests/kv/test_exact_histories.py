"""An answer that came out of a cache is bit for bit the answer without it: real kernels, every tier, with ==.

Each turn is compared with a run that looks nothing up and keeps nothing, on the same token ids: tokens, text,
log-probabilities, and all bits of the logits that each token was drawn from.
"""

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everwarm
from everwarm.engine.sampler import SampledToken, Sampler
from everwarm.kv.receipt import Receipt
from everwarm.llm import LLM, End, Event
from short_and_long import short_and_long
from tiny import Tiny
from waiting_until import PATIENCE_S, wait_until

BLOCK = 64
SHAPES = {
    "llama": Tiny(context=640),
    "qwen": Tiny(context=640, type="Q4_K", architecture="qwen2", biases=True, layers=1),
    "window": Tiny(context=640, type="Q8_0", tied=False, metadata={"attention.sliding_window": 100}, layers=1),
    "narrow": Tiny(context=640, type="Q8_0", width=64, heads=6, kv_heads=1, head_dim=32, ffn=64, layers=3),
}
HISTORIES = 17  # for each shape and type of KV: 204 in all


@dataclass
class Talk:
    """A model, its store, and the bits of all logits that were sampled from."""

    path: Path
    options: dict[str, Any]
    seen: list[np.ndarray]
    llm: LLM = None  # type: ignore[assignment]
    evictions: int = 0

    def open(self, budget_blocks: int | None = None) -> None:
        self.llm = everwarm.load(self.path, warm="on", restore="always", **self.options)
        self.budget_blocks = budget_blocks
        if budget_blocks is not None:
            index = self.llm.agents.index
            index._node_bytes = 0  # tiny models have tiny blocks
            states = 0 if index.states is None else 5 * index.states.block_bytes  # of two sequences, and one besides
            index.resize(budget_blocks * index.block_bytes + states)

    def close(self) -> None:
        store = self.llm.agents
        self.llm.close()
        assert store.index.pool.in_use == store.index.pool.memory.in_use == 0
        self.evictions += store.counters["hot_evictions"]

    def restart(self) -> None:
        self.close()
        self.open(self.budget_blocks)

    def answer(self, **request: Any) -> tuple[list[Event], np.ndarray, Receipt]:
        """Events, bits of the logits (tokens, vocab), receipt."""
        self.seen.clear()
        *events, end = self.llm.stream(**request)
        assert isinstance(end, End)
        assert all(isinstance(event, Event) for event in events)
        return events, np.array(self.seen), end.receipt  # type: ignore[return-value]

    def history(self, agent: str) -> list[int]:
        return self.llm.agents.history(self.llm.agents.find(agent)).ids

    def turn(self, agent: str, asked: dict[str, Any], **options: Any) -> Receipt:
        """A turn that must be what it is without a cache."""
        options = {"temperature": 0.0, "max_tokens": 6, "top_logprobs": 3, "ignore_eos": True} | options
        events, logits, receipt = self.answer(**asked, **options, agent=agent)
        ids = self.history(agent)
        prompt, said = ids[: receipt.prompt_tokens], ids[receipt.prompt_tokens :]
        assert said == [event.token for event in events]
        alone, expected, nothing = self.answer(tokens=prompt, **options, cache=False)
        assert nothing.cached_tokens == 0
        assert events == alone
        assert logits.shape == expected.shape
        assert (logits == expected).all()
        assert (receipt.exact, receipt.committed, receipt.error) == (True, True, None)
        return receipt


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    rows: list[np.ndarray] = []
    sample = Sampler.sample

    def recorded(sampler: Sampler, logits: np.ndarray) -> SampledToken:
        rows.append(logits.copy().view(np.uint32))
        return sample(sampler, logits)

    monkeypatch.setattr(Sampler, "sample", recorded)
    return rows


@pytest.fixture(params=["f16", "q8", "q4"])
def kv_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for name, tiny in SHAPES.items():
        tiny.write(directory / f"{name}.gguf")
    return directory


@pytest.fixture(params=SHAPES)
def talk(
    request: pytest.FixtureRequest, kv_type: str, models: Path, home: Path, seen: list[np.ndarray]
) -> Iterator[Talk]:
    talk = Talk(models / f"{request.param}.gguf", {"kv_type": kv_type}, seen)
    talk.open()
    yield talk
    talk.close()


def words(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(256) for _ in range(count)]


@pytest.mark.parametrize("state", ["cold", "hot", "warm", "restart", "forked", "diverged", "again", "shared"])
def test_in_every_state_the_bits_are_those_without_a_cache(talk: Talk, state: str) -> None:
    """200 tokens are more than three blocks; what follows them reuses all that it can."""
    first = words(1, 200)
    talk.turn("alice", {"tokens": first})
    known = talk.history("alice")
    agent, prompt, cached, tier = "alice", known + words(2, 30), len(known) - 1, "hot"
    match state:
        case "cold":
            agent, prompt, cached, tier = "bob", words(3, 200), 0, "cold"
        case "warm":
            assert talk.llm.agents.evict("alice") == 4 * talk.llm.agents.index.block_bytes
            tier = "warm"
        case "restart":
            talk.restart()
            tier = "warm"
        case "forked":
            talk.llm.agents.fork("alice", "copy")
            agent = "copy"
        case "diverged":
            prompt, cached = [*known[:150], 5, *known[151:]], 150
        case "again":
            prompt, cached = first, len(first) - 1
        case "shared":
            agent = "bob"
    receipt = talk.turn(agent, {"tokens": prompt}, temperature=0.8, seed=4)
    assert (receipt.tier, receipt.cached_tokens) == (tier, cached)
    if state in ("forked", "diverged", "shared"):  # what was shared has not changed
        assert talk.turn("carol", {"tokens": known + words(5, 30)}).cached_tokens >= 192


@pytest.mark.slow
@pytest.mark.parametrize("budget_blocks", [None, 11])
def test_random_histories_of_many_turns_with_edits(talk: Talk, budget_blocks: int | None, kv_type: str) -> None:
    """Agents take turns; what happens between them is drawn. Under the small budget, one agent fills the memory."""
    talk.close()
    talk.open(budget_blocks)
    draw = random.Random(f"{talk.path.stem} {kv_type} {budget_blocks}")
    count = HISTORIES - 6 if budget_blocks is None else 6
    histories: dict[str, list[int]] = {f"agent {number}": [] for number in range(count)}
    tiers = []
    for _ in range(4):
        for agent in draw.sample(sorted(histories), count):
            known = histories[agent]
            if known:
                between(talk, agent, draw)
            prompt = changed(known, draw)
            sampling = {"temperature": 0.9, "seed": draw.randrange(99)} if draw.random() < 0.5 else {}
            receipt = talk.turn(agent, {"tokens": prompt}, max_tokens=draw.randrange(1, 9), **sampling)
            common = next((at for at, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), len(known))
            assert receipt.cached_tokens >= min(common, len(known) - 1, len(prompt) - 1)
            histories[agent] = talk.history(agent)
            tiers.append(receipt.tier)
    assert {"cold", "hot", "warm"} <= set(tiers)
    if budget_blocks is not None:
        assert talk.evictions + talk.llm.agents.counters["hot_evictions"] > 0


def between(talk: Talk, agent: str, draw: random.Random) -> None:
    """What may happen to an agent while it is silent."""
    store = talk.llm.agents
    match draw.choice(["nothing", "nothing", "evict", "restart", "pin", "abandon", "replace"]):
        case "evict":
            store.evict(agent)
        case "restart":
            talk.restart()
        case "pin":
            store.pin(agent)
            store.pin(agent, pinned=False)
        case "abandon":
            stream = talk.llm.stream(tokens=[*talk.history(agent), 1, 2, 3], agent=agent, max_tokens=9, ignore_eos=True)
            next(stream)
            stream.close()  # type: ignore[attr-defined]
            wait_until(lambda: not talk.llm.engine.running)
        case "replace":
            store.fork(agent, "copy")
            store.delete(agent)
            store.fork("copy", agent)
            store.delete("copy")


def changed(known: Sequence[int], draw: random.Random) -> list[int]:
    """More of it, the same again, another middle, another word somewhere, the beginning only."""
    chance = draw.random()
    if not known or len(known) > 500:
        return words(draw.randrange(3), draw.randrange(1, 300))  # three beginnings, which agents share
    if chance < 0.1:
        return list(known)
    if chance < 0.3:
        at = draw.randrange(len(known))
        return [*known[:at], draw.randrange(256), *known[at + 1 :]]
    if chance < 0.4:
        return list(known[: draw.randrange(1, len(known) + 1)])
    return [*known, *words(draw.randrange(10**6), draw.randrange(1, 90))]


def test_conversations_of_messages(talk: Talk) -> None:
    """Answers go back as text. Their bytes keep the ids they had; tokens that no text can hold are kept out."""
    bias = {256: -100.0, 257: -100.0}
    said: list[dict[str, str]] = []
    for turn in range(4):
        said.append({"role": "user", "content": f"zq {turn} " * 6})
        options = {"temperature": 1.0, "seed": turn, "max_tokens": 9, "logit_bias": bias}
        receipt = talk.turn("alice", {"messages": said}, **options, ignore_eos=False)
        assert receipt.match == ("extended" if turn else "none")
        assert receipt.diverged_at_char is None
        said = list(talk.llm.conversation("alice"))
        if turn % 2:
            talk.restart()
    said[2] = {"role": "user", "content": "zq 1 but otherwise"}
    receipt = talk.turn("alice", {"messages": said[:5]})
    assert receipt.match == "diverged"
    assert receipt.cached_tokens > 30


def test_several_at_once_under_a_small_budget_say_what_each_says_alone(talk: Talk) -> None:
    """Six agents share steps and fight for memory; three turns each."""
    talk.close()
    talk.open(budget_blocks=16)
    found: dict[str, list[tuple[list[int], list[Event]]]] = {}
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            draw, agent, prompt = random.Random(number), f"agent {number}", words(number % 2, 150)
            for _ in range(3):
                options = {"temperature": 0.9, "seed": number, "max_tokens": 8, "top_logprobs": 2, "ignore_eos": True}
                events = [e for e in talk.llm.stream(tokens=prompt, agent=agent, **options) if isinstance(e, Event)]
                found.setdefault(agent, []).append((prompt, events))
                prompt = [*prompt, *(event.token for event in events), *words(draw.randrange(100), 40)]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a deadlock"
    if failures:
        raise failures[0]
    assert sorted(map(len, found.values())) == [3] * 6
    for agent, turns in found.items():
        options = {"temperature": 0.9, "seed": int(agent[-1]), "max_tokens": 8, "top_logprobs": 2, "ignore_eos": True}
        for prompt, events in turns:
            assert talk.answer(tokens=prompt, cache=False, **options)[0] == events


@pytest.mark.model
@pytest.mark.slow
@short_and_long("count", 5, 10)
def test_conversations_with_smollm2(smollm2_path: Path, home: Path, seen: list[np.ndarray], count: int) -> None:
    talk = Talk(smollm2_path, {}, seen)
    talk.open()
    draw = random.Random(0)
    topics = ["the sea", "a fox", "Rust", "r\u00f6sti", "tax law", "rain", "Mars", "chess", "bread", "\U0001f98a"]
    for number, topic in enumerate(topics[:count]):
        agent = f"agent {number}"
        said = [{"role": "user", "content": f"Tell me about {topic}."}]
        for turn in range(3):
            sampling = {"temperature": 0.8, "seed": turn} if number % 2 else {}
            receipt = talk.turn(agent, {"messages": said}, **sampling, ignore_eos=False, max_tokens=6)
            assert receipt.cached_tokens > 0 or number == turn == 0  # at least what all conversations begin with
            assert receipt.match in (("extended", "diverged") if turn else ("none", "shared"))
            said = [*talk.llm.conversation(agent), {"role": "user", "content": f"And what else, {turn}?"}]
            match draw.choice(["nothing", "evict", "restart", "edit", "fork"]):
                case "evict":
                    talk.llm.agents.evict(agent)
                case "restart" if number % 3 == 0:
                    talk.restart()
                case "edit":
                    said[0] = {"role": "user", "content": f"Tell me something else about {topic}."}
                case "fork":
                    talk.llm.agents.fork(agent, agent + "'")
                    agent += "'"
    talk.close()


def test_the_reference_backend_says_that_it_is_not_exact_and_is_close(
    models: Path, home: Path, seen: list[np.ndarray]
) -> None:
    talk = Talk(models / "llama.gguf", {"backend": "reference"}, seen)
    talk.open()
    prompt = words(1, 150)
    for state in ("cold", "hot", "warm", "restart"):
        if state == "warm":
            talk.llm.agents.evict("alice")
        if state == "restart":
            talk.restart()
        events, logits, receipt = talk.answer(tokens=prompt, agent="alice", temperature=0.0, max_tokens=5)
        assert (receipt.exact, receipt.tier) == (False, "warm" if state == "restart" else state)
        assert receipt.committed
        alone, expected, nothing = talk.answer(tokens=prompt, cache=False, temperature=0.0, max_tokens=5)
        assert not nothing.exact
        assert [event.token for event in events] == [event.token for event in alone]
        np.testing.assert_allclose(logits.view(np.float32), expected.view(np.float32), atol=1e-4)
        prompt = [*talk.history("alice"), *words(2, 20)]
    talk.close()

"""Real models with a state: what comes out of a cache is what computing gives, bit for bit.

The models are the tiny ones of `golden/oracles`. `model/test_oracles.py` has chunks, batches, threads, instruction sets
and a weight budget; `kv/test_states.py` has where states are kept.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import everwarm
from everwarm.errors import CapacityError
from everwarm.kv.tools.export import export_agent
from everwarm.kv.tools.import_ import import_agent
from golden.oracles.cases import CASES
from golden.oracles.quantise import as_q4_1
from kv.test_exact_histories import (  # noqa: F401  # a fixture, and a test that must hold here as well
    BLOCK,
    Talk,
    seen,
    test_several_at_once_under_a_small_budget_say_what_each_says_alone,
    words,
)

LENGTH = 300
OFTEN = ["qwen35", "mamba2"]  # with attention besides, and without any
SELDOM = ["qwen3next", "qwen35moe", "lfm2", "lfm2moe", "granitehybrid", "falcon-h1", "nemotron_h", "nemotron_h_moe"]


@pytest.fixture(scope="module", params=[*OFTEN, *(pytest.param(name, marks=pytest.mark.soak) for name in SELDOM)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrids")
    (case,) = [case for case in CASES if case.name == request.param]
    return as_q4_1(case.unpack(folder), folder / f"{case.name}-q4_1.gguf")


@pytest.fixture
def talk(model: Path, home: Path, seen: list[np.ndarray]) -> Iterator[Talk]:  # noqa: F811
    talk = Talk(model, {}, seen)
    talk.open()
    yield talk
    talk.close()


def next_logits(talk: Talk, agent: str, prompt: Sequence[int]) -> tuple[np.ndarray, int, int]:
    """Bits of the logits behind a prompt; how many of its tokens are known; from which on it was computed."""
    _, logits, receipt = talk.answer(tokens=list(prompt), agent=agent, temperature=0.0, max_tokens=1, ignore_eos=True)
    return logits[0], receipt.known_tokens, receipt.cached_tokens


def kept_positions(talk: Talk, agent: str) -> tuple[int, ...]:
    return talk.llm.agents.history(talk.llm.agents.find(agent)).positions


def test_a_history_that_is_evicted_at_every_length_goes_on_from_there(talk: Talk) -> None:
    tokens = words(1, LENGTH)
    cold = talk.llm.logits(tokens).view(np.uint32)
    for length in range(1, LENGTH + 1):
        logits, _, cached = next_logits(talk, "alice", tokens[:length])
        assert (logits == cold[length - 1]).all(), f"{length} tokens"
        assert cached == length - 1
        assert talk.llm.agents.evict("alice") > 0


def test_a_history_is_restored_at_every_position_from_the_state_before_it(talk: Talk) -> None:
    end = next(iter(talk.llm.tokenizer.eog_ids))
    tokens = words(1, LENGTH)
    tokens[9::30] = [end] * len(tokens[9::30])  # messages of 30 tokens
    cold = talk.llm.logits(tokens).view(np.uint32)
    next_logits(talk, "alice", tokens)
    positions = kept_positions(talk, "alice")
    assert len(positions) >= 4
    for position in range(1, LENGTH + 1):
        talk.llm.agents.evict("alice")
        logits, known, cached = next_logits(talk, "branch", tokens[:position])
        assert (logits == cold[position - 1]).all(), f"{position} tokens"
        assert known == position - 1
        assert cached == max(kept for kept in (0, *positions) if kept <= known)
        talk.llm.agents.delete("branch")


@pytest.mark.parametrize("edited", [0, 2, -1])
def test_an_edited_message_is_computed_from_a_state_before_it(talk: Talk, edited: int) -> None:
    """The first message, one in the middle, the last."""
    bias = {256: -100.0, 257: -100.0}  # control tokens, which no text can hold
    said: list[dict[str, str]] = []
    for turn in range(4):
        said.append({"role": "user", "content": f"What about {turn}, and why is that so? " * 2})
        talk.turn("alice", {"messages": said}, temperature=1.0, seed=turn, max_tokens=9, logit_bias=bias)
        said = list(talk.llm.conversation("alice"))
    talk.restart()
    said = said[:-1]
    said[edited] = {"role": "user", "content": "No, I have meant something else."}
    receipt = talk.turn("alice", {"messages": said})
    assert receipt.match == ("diverged" if receipt.cached_tokens else "none")
    if edited == -1:
        assert 0 <= receipt.known_tokens - receipt.cached_tokens < BLOCK
        assert receipt.cached_tokens > 3 * BLOCK


def test_agents_that_begin_alike_share_the_states_at_fixed_positions(talk: Talk) -> None:
    marks = talk.llm.agents._context.marks.every
    tokens = words(1, marks + 70)
    talk.turn("alice", {"tokens": tokens})
    for agent, restored in (("bob", False), ("carol", True)):
        if restored:
            talk.restart()
        receipt = talk.turn(agent, {"tokens": [*tokens[: marks + 40], *words(len(agent), 30)]})
        assert (receipt.match, receipt.known_tokens, receipt.cached_tokens) == ("shared", marks + 40, marks)
        assert receipt.tier == ("warm" if restored else "hot")
    assert talk.turn("alice", {"tokens": [*talk.history("alice"), 1]}).cached_tokens == len(talk.history("alice")) - 8


def test_an_exported_agent_goes_on_where_it_is_imported(talk: Talk, tmp_path: Path) -> None:
    talk.turn("alice", {"tokens": words(1, 150)})
    known = talk.history("alice")
    file = tmp_path / "alice.safetensors"
    export_agent(talk.llm.agents, "alice", file)
    talk.llm.agents.delete("alice")
    import_agent(talk.llm.agents, file, "bob")
    receipt = talk.turn("bob", {"tokens": [*known, *words(2, 30)]})
    assert (receipt.tier, receipt.cached_tokens) == ("warm", len(known) - 1)


def test_a_fork_in_the_middle_leaves_the_original_as_it_was(talk: Talk) -> None:
    talk.turn("alice", {"tokens": words(1, 150)})
    known = talk.history("alice")
    talk.llm.agents.fork("alice", "bob")
    receipt = talk.turn("bob", {"tokens": [*known[:140], *words(2, 30)]})
    assert (receipt.known_tokens, receipt.cached_tokens) == (140, 2 * BLOCK)
    talk.llm.agents.evict("alice")
    assert talk.turn("alice", {"tokens": [*known, *words(3, 30)]}).cached_tokens == len(known) - 1


def test_a_budget_that_a_state_does_not_fit_into_is_refused_with_the_figures(model: Path, home: Path) -> None:
    with everwarm.load(model, kv_budget="16KiB") as llm:
        needed = llm.agents.index.bytes_for(3)
        with pytest.raises(CapacityError, match=rf"{needed:,} bytes of KV are needed for 3 tokens, the budget holds "):
            llm.generate(tokens=[1, 2, 3], max_tokens=1)

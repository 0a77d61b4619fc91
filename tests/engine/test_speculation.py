"""Drafts out of what was said before: the same tokens and log-probabilities as without, whatever else is asked for.

How many rows a draft gets depends on how long steps take. Here every token that is proposed is computed, unless a test
says otherwise, so that the tests do the same each time and reject as much as they can.
"""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import everwarm
from everwarm.engine import scheduler
from everwarm.engine.drafts import lookup
from everwarm.engine.drafts.tenant_tokens import TenantTokens
from everwarm.errors import CancelledError
from everwarm.events import End
from everwarm.kernels._native import Suffixes
from everwarm.llm import LLM
from golden.oracles.cases import CASES
from short_and_long import short_and_long
from tiny import Tiny
from waiting_until import wait_until

Said = list[tuple[int, float, object, object]]

SAMPLED = {"temperature": 0.9, "top_k": 3}
CONSTRAINED = {"regex": r"(\[(zero|one|two), (zero|one)\]; ){4,20}", "temperature": 0.7}
KINDS: dict[str, dict[str, object]] = {"greedy": {}, "sampled": SAMPLED, "constrained": CONSTRAINED}


@pytest.fixture(autouse=True)
def _all_of_each_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "lengths", lambda proposals, *_: [len(one.tokens) for _, one in proposals])
    monkeypatch.setattr(lookup, "LEAST_CHANCE", 0.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("speculation") / "tiny.gguf"
    Tiny(context=1024, type="Q4_0").write(path)
    return path


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[LLM]:
    with everwarm.load(path, speculate="off") as llm:
        yield llm


@pytest.fixture
def drafting(path: Path) -> Iterator[LLM]:
    with everwarm.load(path) as llm:
        yield llm


def prompts(count: int) -> list[list[int]]:
    """With repetitions, as prompts of agents have them."""
    draw = random.Random(5)
    found = []
    for _ in range(count):
        phrases = [[draw.randrange(256) for _ in range(draw.randint(2, 12))] for _ in range(4)]
        found.append([token for _ in range(draw.randint(1, 12)) for token in draw.choice(phrases)])
    return found


def answer(llm: LLM, prompt: list[int], **options: object) -> tuple[Said, End]:
    options = {"max_tokens": 60, "ignore_eos": "regex" not in options, "top_logprobs": 2, "seed": 11} | options
    *events, end = llm.stream(tokens=prompt, **options)
    assert isinstance(end, End)
    return [(one.token, one.logprob, one.top_logprobs, one.content) for one in events], end


def said(llm: LLM, prompt: list[int], **options: object) -> Said:
    return answer(llm, prompt, **options)[0]


def checked(end: End) -> End:
    """With counts that agree with each other."""
    receipt = end.receipt
    assert receipt.passes + receipt.accepted_tokens == end.usage.completion_tokens
    assert 0 <= receipt.accepted_tokens <= receipt.drafted_tokens
    return end


@pytest.mark.parametrize("kind", KINDS)
@short_and_long("count", 16, 200)
def test_drafts_change_nothing_in_any_batch(plain: LLM, drafting: LLM, kind: str, count: int) -> None:
    asked = prompts(count)
    expected = [said(plain, prompt, cache=False, **KINDS[kind]) for prompt in asked]
    drafted = accepted = 0
    for prompt, alone in zip(asked, expected, strict=True):
        found, end = answer(drafting, prompt, cache=False, **KINDS[kind])
        assert found == alone
        drafted += checked(end).receipt.drafted_tokens
        accepted += end.receipt.accepted_tokens
    assert drafted > accepted > 0  # some were right, some were wrong
    with ThreadPoolExecutor(8) as threads:
        together = threads.map(
            lambda number: said(
                drafting if number % 4 else plain, asked[number], cache=number % 2 == 0, keep=number % 3 == 0,
                **KINDS[kind],
            ),
            range(count),
        )  # fmt: skip
        assert list(together) == expected


@pytest.mark.parametrize("kv_type", ["f16", "q8", "q4"])
@pytest.mark.parametrize("name", ["gemma3", "qwen3moe", "deepseek2", "lfm2", "qwen35"])
def test_every_kind_of_layer_and_of_kv(name: str, kv_type: str, tmp_path: Path) -> None:
    case = next(one for one in CASES if one.name == name)
    path = case.unpack(tmp_path)
    options = {"kv_type": kv_type, "context": case.context}
    with everwarm.load(path, speculate="off", **options) as plain, everwarm.load(path, **options) as drafting:
        drafted = 0
        for prompt in prompts(4):
            for kind in ("greedy", "sampled"):
                expected = said(plain, prompt, cache=False, **KINDS[kind])
                found, end = answer(drafting, prompt, **KINDS[kind])
                assert found == expected
                drafted += checked(end).receipt.drafted_tokens
        has_state = bool(drafting.config.state_shape)
        assert (drafted == 0) == has_state  # a state can't be taken back


@short_and_long("count", 3, 40)
def test_a_conversation_goes_on_after_a_restart(
    path: Path, plain: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setenv("EVERWARM_HOME", str(tmp_path))
    for number, prompt in enumerate(prompts(count)):
        kind = list(KINDS)[number % 3]
        history = list(prompt)
        for turn in range(3):
            expected = said(plain, history, cache=False, **KINDS[kind])
            with everwarm.load(path, warm="on") as llm:
                found, end = answer(llm, history, agent=f"agent {number}", **KINDS[kind])
                assert found == expected
                if turn:
                    assert checked(end).receipt.cached_tokens == len(history) - 3
                kept = llm.agents.history(llm.agents.find(f"agent {number}")).ids
            history += [token for token, *_ in expected]
            assert kept == history
            history += [72, 105]


def test_what_another_agent_of_the_tenant_has_said_is_drafted(plain: LLM, drafting: LLM) -> None:
    prompt = [draw.randrange(256) for draw in [random.Random(9)] for _ in range(40)]
    expected = said(plain, prompt, cache=False, **SAMPLED)
    first = answer(drafting, prompt, agent="a", tenant="one", **SAMPLED)
    second = answer(drafting, prompt, agent="b", tenant="one", **SAMPLED)
    other = answer(drafting, prompt, agent="a", tenant="two", **SAMPLED)
    nobody = answer(drafting, prompt, cache=False, **SAMPLED)
    assert first[0] == second[0] == other[0] == nobody[0] == expected
    assert second[1].receipt.accepted_tokens > 30
    assert all(end.receipt.accepted_tokens < 30 for _, end in (first, other, nobody))


def test_what_is_not_kept_is_not_remembered(drafting: LLM) -> None:
    prompt = prompts(1)[0]
    for _ in range(2):
        answer(drafting, prompt, keep=False)
        answer(drafting, prompt, cache=False)
    assert drafting.drafts is not None
    assert drafting.drafts.size_bytes == 0
    answer(drafting, prompt)
    assert drafting.drafts.size_bytes > 0
    answer(drafting, prompt, agent="a")
    drafting.agents.delete("a")
    assert drafting.drafts.size_bytes == 0


def test_stop_strings_end_an_answer_inside_a_draft(plain: LLM, drafting: LLM) -> None:
    for prompt in prompts(6):
        text = "".join(part.text for *_, content in said(plain, prompt, cache=False) for part in content)
        for at in (3, 10, 17):
            stop = text[at : at + 2]
            expected = answer(plain, prompt, cache=False, stop=stop)
            found = answer(drafting, prompt, stop=stop)
            assert found[0] == expected[0]
            assert (found[1].stop, found[1].finish_reason) == (stop, "stop")
            checked(found[1])


def test_end_tokens_and_limits_end_an_answer_inside_a_draft(plain: LLM, drafting: LLM) -> None:
    for prompt in prompts(6):
        for most in (1, 2, 7):
            found, end = answer(drafting, prompt, max_tokens=most)
            assert found == said(plain, prompt, cache=False, max_tokens=most)
            assert checked(end).receipt.drafted_tokens <= (most - 1) * end.receipt.passes
        biased = {"ignore_eos": False, "temperature": 1.0, "logit_bias": {258: 4.0}}
        assert said(drafting, prompt, **biased) == said(plain, prompt, cache=False, **biased)
    long = [7, 8, 9] * 338  # 1014 of 1024
    found, end = answer(drafting, long, max_tokens=99)
    assert (len(found), end.finish_reason) == (10, "length")
    assert found == said(plain, long, cache=False, max_tokens=99)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.4, "temperature": 0.8},
        {"logit_bias": {65: 3.0, 66: -2.0}, "temperature": 1.2, "top_p": 0.7},
        {"min_p": 0.2, "temperature": 1.5},
        {"top_logprobs": 20},
    ],
    ids=lambda options: next(iter(options)),
)
def test_penalties_bias_and_log_probabilities(plain: LLM, drafting: LLM, options: dict[str, object]) -> None:
    for prompt in prompts(8):
        assert said(drafting, prompt, **options) == said(plain, prompt, cache=False, **options)


def test_several_choices(plain: LLM, drafting: LLM) -> None:
    def choices(llm: LLM, prompt: list[int]) -> list[list[int]]:
        first = llm.start(tokens=prompt, max_tokens=40, ignore_eos=True, seed=1, **SAMPLED)
        events = first.events()
        tokens = [[next(events).token]]
        others = [first.another_choice(number, seed=1 + number) for number in (1, 2, 3)]
        tokens += [[one.token for one in other.events() if not isinstance(one, End)] for other in others]
        tokens[0] += [one.token for one in events if not isinstance(one, End)]
        return tokens

    for prompt in prompts(4):
        assert choices(drafting, prompt) == choices(plain, prompt)


def test_preemption_while_drafting(path: Path, plain: LLM) -> None:
    asked = [(prompt * 20)[:90] for prompt in prompts(6)]
    options = {"max_tokens": 300, **SAMPLED}
    expected = [said(plain, prompt, cache=False, **options) for prompt in asked]
    block = plain.new_kv().pool.block_bytes
    with everwarm.load(path, kv_budget=14 * block) as llm, ThreadPoolExecutor(6) as threads:
        llm.agents.index._node_bytes = 0
        found = list(threads.map(lambda prompt: answer(llm, prompt, **options), asked))
        assert [one for one, _ in found] == expected
        assert llm.engine.preemptions > 0
        assert llm.engine.accepted > 0
        assert llm.agents.index.pool.in_use <= 14
        assert sum(checked(end).receipt.passes for _, end in found) == llm.engine.passes


def test_cancelled_inside_a_draft(drafting: LLM) -> None:
    for after in (1, 5, 20):
        generation = drafting.start(tokens=[7, 8, 9] * 30, max_tokens=900, ignore_eos=True)
        events = generation.events()
        for _ in range(after):
            next(events)
        threading.Thread(target=generation.cancel).start()
        with pytest.raises(CancelledError):
            for _ in events:
                pass
    assert drafting.engine.running == 0
    wait_until(lambda: drafting.agents.stats().blocks_in_use == drafting.agents.stats().blocks_kept)


def test_switched_off_nothing_is_drafted(plain: LLM) -> None:
    assert plain.drafts is None
    _, end = answer(plain, [7, 8, 9] * 30)
    assert (end.receipt.drafted_tokens, end.receipt.passes) == (0, 60)
    _, end = answer(plain, [7], regex="(abcdefgh)+", ignore_eos=True)
    assert end.receipt.drafted_tokens == 0


def test_a_backend_whose_numbers_depend_on_the_batch_drafts_only_what_is_certain(path: Path) -> None:
    with everwarm.load(path, backend="reference") as llm:
        assert answer(llm, [7, 8, 9] * 30)[1].receipt.drafted_tokens == 0
        end = answer(llm, [7], regex="(abcdefgh){3}")[1]
        assert end.receipt.accepted_tokens > 0


def test_the_memory_of_tenants_is_bounded() -> None:
    draw = random.Random(1)
    most = 40_000 * Suffixes.bytes_per_token
    tokens = TenantTokens(most)
    text: Callable[[], list[int]] = lambda: [draw.randrange(50_000) for _ in range(9000)]  # noqa: E731
    for number in range(12):
        tokens.remember(f"tenant {number % 5}", text())
        assert 0 < tokens.size_bytes <= most
    assert tokens.of("tenant 1") is not None
    assert tokens.of("tenant 2") is None  # the one that was used least lately had to go
    one = TenantTokens(most)
    for _ in range(8):
        one.remember("", text())
        assert one.size_bytes <= most
    assert TenantTokens(1000).of("") is None
    TenantTokens(1000).remember("", [1, 2, 3])

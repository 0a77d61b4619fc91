"""Drafts: several rows of a sequence in one step. Right or wrong, the answer is the same to the last bit."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import everwarm
from everwarm.llm import LLM
from tiny import Tiny

PROMPTS = [[72, 101, number % 7, *range(60, 60 + number)] for number in (3, 20, 62, 63, 64, 65, 130)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafts") / "tiny.gguf"
    Tiny(context=512, type="Q4_0").write(path)
    return path


def events(llm: LLM, prompt: list[int], **options: object) -> list[tuple[int, float, object]]:
    stream = llm.stream(tokens=prompt, max_tokens=90, ignore_eos=True, top_logprobs=2, **options)
    return [(one.token, one.logprob, one.top_logprobs) for one in stream if isinstance(one, everwarm.Event)]


def foretelling(prompt: list[int], answer: list[int], draw: random.Random) -> Callable[[list[int]], list[int]]:
    """A drafter that knows the answer, tells some of it, and is often wrong."""

    def propose(tokens: list[int]) -> list[int]:
        done = len(tokens) - len(prompt)
        assert tokens == [*prompt, *answer[:done]]  # it is shown accepted tokens only
        draft = answer[done : done + draw.choice([0, 1, 2, 7, 20])]
        if draft and draw.random() < 0.5:
            draft[draw.randrange(len(draft))] = draw.randrange(260)
        return draft + [draw.randrange(260)] * draw.choice([0, 0, 3])

    return propose


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.1}])
@pytest.mark.parametrize("kv_type", ["f16", "q8"])
def test_drafts_change_no_token_and_no_log_probability(path: Path, sampling: dict[str, object], kv_type: str) -> None:
    draw = random.Random(str(sampling) + kv_type)
    with everwarm.load(path, kv_type=kv_type) as llm, ThreadPoolExecutor(8) as threads:
        expected = [events(llm, prompt, cache=False, **sampling) for prompt in PROMPTS]
        steps = llm.engine.steps
        for prompt, answer in zip(PROMPTS, expected, strict=True):
            drafter = foretelling(prompt, [token for token, *_ in answer], draw)
            assert events(llm, prompt, cache=False, drafter=drafter, **sampling) == answer
        assert llm.engine.steps - steps < 0.7 * 90 * len(PROMPTS)  # some of the drafts were right

        def drafted(number: int) -> list[tuple[int, float, object]]:
            answer = expected[number]
            drafter = foretelling(PROMPTS[number], [token for token, *_ in answer], random.Random(number))
            return events(llm, PROMPTS[number], cache=False, drafter=drafter if number % 3 else None, **sampling)

        assert list(threads.map(drafted, range(len(PROMPTS)))) == expected  # all in one batch


def test_what_was_drafted_and_rejected_is_not_kept(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERWARM_HOME", str(tmp_path))
    wrong = random.Random(1)
    for number, prompt in enumerate(PROMPTS):
        with everwarm.load(path, warm="on") as llm:
            expected = events(llm, prompt, cache=False)
            assert (
                events(llm, prompt, agent=f"agent {number}", drafter=lambda _: wrong.choices(range(260), k=9))
                == expected
            )
            history = llm.agents.history(llm.agents.find(f"agent {number}")).ids
            assert history == [*prompt, *(token for token, *_ in expected)]
        with everwarm.load(path, warm="on") as llm:  # from disk
            again = [*history, 1]
            cold = events(llm, again, cache=False)
            stream = list(
                llm.stream(tokens=again, agent=f"agent {number}", max_tokens=90, ignore_eos=True, top_logprobs=2)
            )
            assert [(one.token, one.logprob, one.top_logprobs) for one in stream[:-1]] == cold
            assert stream[-1].receipt.cached_tokens == len(history) - 1


def test_a_draft_stops_where_the_answer_does(path: Path) -> None:
    with everwarm.load(path) as llm:
        expected = events(llm, PROMPTS[0], cache=False)
        end = expected[10][0]
        answer = [token for token, *_ in expected]
        stop = [
            one.token
            for one in llm.stream(
                tokens=PROMPTS[0], max_tokens=11, ignore_eos=True, cache=False, drafter=lambda tokens: answer[1:60]
            )
            if isinstance(one, everwarm.Event)
        ]
        assert stop == answer[:11]
        assert stop[-1] == end
        full = [72] * 505
        tail = list(llm.stream(tokens=full, max_tokens=99, ignore_eos=True, cache=False, drafter=lambda _: [1] * 50))
        assert tail[-2].finish_reason == "length"  # the context is full

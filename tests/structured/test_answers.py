"""Answers that follow a schema, from a tiny model: valid, and the same to the last bit however they are computed."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import numpy as np
import pytest

import everwarm
from everwarm.engine import processors
from everwarm.engine.drafts.drafts import Drafts
from everwarm.engine.processors import packed
from everwarm.errors import RequestError
from everwarm.llm import LLM
from tiny import Tiny

PERSON = {
    "type": "object",
    "properties": {
        "name_of_the_person": {"type": "string", "maxLength": 12},
        "age_in_whole_years": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["short", "tall", "quick"]}, "maxItems": 3},
    },
    "required": ["name_of_the_person", "age_in_whole_years", "tags"],
    "additionalProperties": False,
}
NO_BLANKS = dict.fromkeys(b" \t\r\n", -50.0)
"""A logit bias: a random model writes all the blanks that it may."""
SAMPLINGS: list[dict[str, object]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 1.3, "seed": 7, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.5},
]
PROMPTS = [[72, 101, number % 7, *range(60, 60 + number)] for number in (3, 20, 62, 63, 64, 65, 130)]
Said = list[tuple[int, float, object]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("structured") / "tiny.gguf"
    Tiny(context=1024, type="Q4_0").write(path)
    return path


@pytest.fixture(scope="module")
def llm(path: Path) -> LLM:
    with everwarm.load(path) as llm:
        yield llm


def said(llm: LLM, prompt: list[int], **options: object) -> Said:
    options = {
        "max_tokens": 250,
        "top_logprobs": 2,
        "schema": PERSON,
        "cache": False,
        "logit_bias": NO_BLANKS,
    } | options
    stream = llm.stream(tokens=prompt, **options)
    return [(one.token, one.logprob, one.top_logprobs) for one in stream if isinstance(one, everwarm.Event)]


def text_of(llm: LLM, answer: Said) -> str:
    return llm.detokenize([token for token, *_ in answer])


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_an_answer_is_valid_json(llm: LLM, sampling: dict[str, object]) -> None:
    for prompt in PROMPTS:
        completion = llm.generate(
            tokens=prompt, max_tokens=400, schema=PERSON, logit_bias=NO_BLANKS, cache=False, **sampling
        )
        assert completion.finish_reason == "stop"
        jsonschema.validate(json.loads(completion.text), PERSON)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_forced_tokens_save_steps_and_change_nothing(
    llm: LLM, sampling: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm, "drafts", Drafts(1, exact=False))  # only what is certain
    counts = []
    answers = []
    for most in (0, 1, 16):
        monkeypatch.setattr(processors, "MOST_FORCED", most)
        before = llm.engine.steps
        answers.append([said(llm, prompt, **sampling) for prompt in PROMPTS])
        counts.append(llm.engine.steps - before)
    assert answers[0] == answers[1] == answers[2]  # tokens, log-probabilities, alternatives
    assert sum(map(len, answers[0])) == counts[0] > 1.3 * counts[1] > 1.3 * counts[2]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_who_else_is_in_the_batch_changes_nothing(llm: LLM, sampling: dict[str, object]) -> None:
    expected = [said(llm, prompt, **sampling) for prompt in PROMPTS]
    free = [said(llm, prompt, schema=None, ignore_eos=True, max_tokens=60, **sampling) for prompt in PROMPTS]
    with ThreadPoolExecutor(14) as threads:
        bound = [threads.submit(said, llm, prompt, **sampling) for prompt in PROMPTS]
        other = [
            threads.submit(said, llm, prompt, schema=None, ignore_eos=True, max_tokens=60, **sampling)
            for prompt in PROMPTS
        ]
        assert [one.result() for one in bound] == expected
        assert [one.result() for one in other] == free


def test_a_sequence_that_gives_up_its_memory_says_the_same(path: Path, home: Path) -> None:
    prompts = [[number, *range(60, 140)] for number in range(6)]
    options = {"temperature": 1.0, "seed": 3, "regex": "(ab|cdefgh|ijklmnop){60}", "schema": None, "max_tokens": 600}
    with everwarm.load(path) as llm:
        expected = [said(llm, prompt, **options) for prompt in prompts]
        block = llm.new_kv().pool.block_bytes
    with everwarm.load(path, warm="on", kv_budget=14 * block) as llm, ThreadPoolExecutor(6) as threads:
        llm.agents.index._node_bytes = 0
        answers = list(threads.map(lambda prompt: said(llm, prompt, **(options | {"cache": True})), prompts))
        assert llm.engine.preemptions > 0
        assert answers == expected


def test_an_agent_goes_on_after_a_restart(path: Path, home: Path) -> None:
    with everwarm.load(path, warm="on") as llm:
        first = said(llm, PROMPTS[1], agent="a", cache=True)
        history = llm.agents.history(llm.agents.find("a")).ids
        assert history == [*PROMPTS[1], *(token for token, *_ in first)]
        expected = said(llm, [*history, 70], seed=2, temperature=1.0)
    with everwarm.load(path, warm="on") as llm:
        assert said(llm, [*history, 70], agent="a", cache=True, seed=2, temperature=1.0) == expected


def test_every_choice_follows_the_schema_by_itself(llm: LLM) -> None:
    first = llm.start(tokens=PROMPTS[0], schema=PERSON, logit_bias=NO_BLANKS, max_tokens=400, temperature=1.0, seed=11)
    texts = []
    for number in range(4):
        generation = first if number == 0 else first.another_choice(number, 11 + number)
        texts.append("".join(event.text for event in generation.events()))
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 1


def test_a_limit_of_tokens_cuts_inside_forced_ones(llm: LLM) -> None:
    whole = said(llm, PROMPTS[0])
    for limit in range(1, 30):
        assert said(llm, PROMPTS[0], max_tokens=limit) == whole[:limit]


def test_a_stop_string_ends_it_inside_forced_tokens(llm: LLM) -> None:
    completion = llm.generate(
        tokens=PROMPTS[0], schema=PERSON, logit_bias=NO_BLANKS, max_tokens=400, stop=["in_whole"], cache=False
    )
    assert completion.finish_reason == "stop"
    assert completion.text.endswith('"age_')
    assert len(completion.tokens) == len(completion.text.encode()) + len("in_whole")


def test_a_regular_expression_and_a_grammar(llm: LLM) -> None:
    for seed in range(5):
        options = {"max_tokens": 60, "temperature": 1.0, "seed": seed, "cache": False}
        assert re.fullmatch("[a-z]{3}-[0-9]{2,4}", llm.generate("x", regex="[a-z]{3}-[0-9]{2,4}", **options).text)
        text = llm.generate("x", grammar='root ::= "(" ("a" | "b" | root){1,2} ")"', **options).text
        assert set(text) <= set("(ab)")


def test_only_one_of_them(llm: LLM) -> None:
    with pytest.raises(RequestError, match="schema and regex: an answer can follow only one"):
        llm.start("x", schema=PERSON, regex="a")
    with pytest.raises(RequestError, match="either a constraint or"):
        llm.start("x", schema=PERSON, constraint=lambda: None)  # type: ignore[arg-type, return-value]


class Failing:
    """A constraint that allows one token and fails at the next."""

    def __init__(self, good: int) -> None:
        self._left = good

    def mask(self) -> np.ndarray:
        if not self._left:
            raise RequestError("too complex")
        return packed(np.arange(260) == 65)

    def advance(self, token: int) -> None:
        self._left -= 1

    def rollback(self, count: int) -> None:
        self._left += count


@pytest.mark.parametrize("good", [0, 1, 3])
def test_a_constraint_that_fails_ends_its_own_request_only(llm: LLM, good: int) -> None:
    expected = said(llm, PROMPTS[1])
    with ThreadPoolExecutor(4) as threads:
        others = [threads.submit(said, llm, PROMPTS[1]) for _ in range(3)]
        with pytest.raises(RequestError, match="too complex"):
            said(llm, PROMPTS[0], schema=None, constraint=lambda: Failing(good))
        assert [one.result() for one in others] == [expected] * 3


def test_a_bias_against_the_only_token_is_an_error_of_that_request(llm: LLM) -> None:
    with pytest.raises(RequestError, match="forbids every token"):
        llm.generate("x", regex="ab", logit_bias={97: float("-inf")}, max_tokens=3, cache=False)

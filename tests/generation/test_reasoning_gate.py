"""A budget of reasoning: what is forced when it is spent, what follows, and what a rollback takes back."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import everwarm
from everwarm.events import Answer, End
from everwarm.generation.reasoning_gate import ReasoningGate
from everwarm.llm import LLM
from everwarm.text.reasoning import ReasoningFormat, Thinking
from output_parsers import Says
from tiny import Tiny

THINK = ReasoningFormat("<think>", "</think>", "\n</think>\n\n")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking %}{{ '<think>\n' }}{% else %}"
    "{{ '<think></think>' }}{% endif %}"
)
HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("gate") / "tiny.gguf"
    Tiny(context=1024, template=TEMPLATE).write(path)
    with everwarm.load(path, threads=1, warm="off", pack="off") as llm:
        yield llm


def allowed_by(gate: ReasoningGate) -> set[int] | None:
    """The tokens that may follow; None: all of them."""
    mask = gate.mask()
    return None if mask is None else set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def follow(gate: ReasoningGate, llm: LLM, text: str) -> None:
    for token in llm.tokenize(text):
        allowed = allowed_by(gate)
        assert allowed is None or token in allowed, (text, token)
        gate.advance(token)


def only(gate: ReasoningGate) -> int | None:
    """The one token that may follow, if it is one."""
    allowed = allowed_by(gate)
    return next(iter(allowed)) if allowed is not None and len(allowed) == 1 else None


def forced(gate: ReasoningGate, llm: LLM) -> str:
    """What is written for the model from here on."""
    tokens = []
    while (token := only(gate)) is not None:
        tokens.append(token)
        gate.advance(token)
    return llm.detokenize(tokens)


def test_the_end_is_forced_when_the_budget_is_spent(llm: LLM) -> None:
    gate = ReasoningGate(llm.tokenizer, THINK, inside=True, budget=5)
    follow(gate, llm, "12345")
    assert forced(gate, llm) == "\n</think>\n\n"
    assert gate.mask() is None


def test_a_budget_of_none_ends_reasoning_at_once(llm: LLM) -> None:
    assert forced(ReasoningGate(llm.tokenizer, THINK, inside=True, budget=0), llm) == "\n</think>\n\n"
    gate = ReasoningGate(llm.tokenizer, THINK, inside=False, budget=0)
    follow(gate, llm, "<think>")
    assert forced(gate, llm) == "\n</think>\n\n"


def test_reasoning_that_ends_by_itself_is_left_alone(llm: LLM) -> None:
    gate = ReasoningGate(llm.tokenizer, THINK, inside=True, budget=50)
    follow(gate, llm, "hm</think>" + "x" * 100)
    assert gate.mask() is None


def test_an_answer_without_reasoning_is_left_alone(llm: LLM) -> None:
    gate = ReasoningGate(llm.tokenizer, THINK, inside=False, budget=3)
    follow(gate, llm, "<thin ice, and more")
    assert gate.mask() is None


def test_the_answers_own_constraint_begins_with_the_answer(llm: LLM) -> None:
    says = partial(Says, llm.tokenize("Yes."), llm.config.vocab_size)
    gate = ReasoningGate(llm.tokenizer, THINK, inside=True, budget=3, answer=says())
    follow(gate, llm, "abc\n</think>\n\nYes.")
    gate = ReasoningGate(llm.tokenizer, THINK, inside=False, answer=says())
    allowed = allowed_by(gate)
    assert allowed is not None
    assert {chr(token) for token in allowed} == {"<", "Y"}  # the tiny vocabulary is the bytes
    follow(gate, llm, "<think>hm</think>Yes.")
    follow(ReasoningGate(llm.tokenizer, THINK, inside=False, answer=says()), llm, "Yes.")


def test_a_rollback_takes_back_everything(llm: LLM) -> None:
    says = partial(Says, llm.tokenize("Yes, it is."), llm.config.vocab_size)
    text = llm.tokenize("<think>abc") + llm.tokenize("\n</think>\n\nYes, it is.")
    source = random.Random(5)
    for _ in range(50):
        gate = ReasoningGate(llm.tokenizer, THINK, inside=False, budget=3, answer=says())
        at, masks = 0, {}
        while at < len(text):
            mask = gate.mask()
            seen = None if mask is None else mask.tobytes()
            assert masks.setdefault(at, seen) == seen
            gate.advance(text[at])
            at += 1
            if at and source.random() < 0.1:  # more often, it would hardly ever come to the end
                back = source.randrange(at + 1)
                gate.rollback(back)
                at -= back


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_a_generation_keeps_its_budget(llm: LLM, budget: int) -> None:
    answer = Answer()
    end: Any = None
    says = partial(Says, [*llm.tokenize("Yes."), 258], llm.config.vocab_size)
    letters = dict.fromkeys(b"abcdefghijklmnopqrstuvwxyz", 50.0)
    for event in llm.stream(
        messages=HI, thinking=Thinking(True, budget=budget), constraint=says, max_tokens=100, logit_bias=letters
    ):
        if isinstance(event, End):
            end = event
        else:
            answer.add(event.content)
    assert (len(answer.reasoning), answer.text, end.finish_reason) == (budget, "Yes.", "stop")
    assert answer.message().get("reasoning_content", "") == answer.reasoning
    assert end.usage.completion_tokens == budget + len("\n</think>\n\nYes.") + 1


def test_a_budget_without_reasoning_changes_nothing(llm: LLM) -> None:
    options: Any = {"messages": HI, "max_tokens": 20, "temperature": 0}
    plain = llm.generate(thinking=Thinking(False), **options)
    bounded = llm.generate(thinking=Thinking(False, budget=3), template_variables={"thinking_budget": None}, **options)
    assert plain.tokens == bounded.tokens


def test_a_model_that_does_not_reason_ignores_the_budget(tmp_path: Path) -> None:
    Tiny(context=256).write(tmp_path / "tiny.gguf")
    with everwarm.load(tmp_path / "tiny.gguf", threads=1, warm="off", pack="off") as llm:
        assert llm.chat.reasoning is None
        assert llm.generate(messages=HI, thinking=Thinking(True, budget=1), max_tokens=3).tokens

"""Reasoning told from the answer: marks by template, answers that begin inside, any cut."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_chat import GOLDEN, golden_template, text
from tool_call_answers import parser

from everwarm.events import Content, Reasoning, Text, ToolCallArguments, ToolCallEnd, ToolCallStart
from everwarm.text.chat_format import ChatFormat
from everwarm.text.output_parser import OutputParser, PlainText
from everwarm.text.reasoning import HARMONY, ReasoningFormat, ReasoningParser, Thinking, reasoning_format_of
from output_parsers import joined

THINK = ReasoningFormat("<think>", "</think>", "\n</think>\n\n")
NONE: frozenset[str] = frozenset()


def read(reader: OutputParser, pieces: list[str]) -> list[Content]:
    content: list[Content] = []
    for piece in pieces:
        if piece:
            content += reader.control(piece) if piece in reader.control_tokens else reader.feed(piece)
    return joined([*content, *reader.finish()])


def think(pieces: list[str], *, inside: bool = False, form: ReasoningFormat = THINK) -> list[Content]:
    return read(ReasoningParser(form, PlainText(), inside=inside, controls=NONE), pieces)


@pytest.mark.parametrize(
    ("inside", "answer", "expected"),
    [
        (False, "<think>\nhm\n</think>\n\nYes.", [Reasoning("hm"), Text("Yes.")]),
        (False, "\n<think>hm</think>Yes.\n", [Reasoning("hm"), Text("Yes.\n")]),
        (False, "<think></think>Yes.", [Text("Yes.")]),
        (False, "</think>Yes.", [Text("Yes.")]),
        (False, " Yes. <think>no</think>", [Text(" Yes. <think>no</think>")]),
        (False, "<thin ice", [Text("<thin ice")]),
        (False, "<think>a </thin b\n", [Reasoning("a </thin b\n")]),
        (True, "hm\n\nhm</think>\nYes.", [Reasoning("hm\n\nhm"), Text("Yes.")]),
        (True, "<think>\nhm</think>Yes.", [Reasoning("hm"), Text("Yes.")]),
        (True, "hm", [Reasoning("hm")]),
        (True, "", []),
        (False, "", []),
        (False, "<", [Text("<")]),
    ],
)
def test_reasoning_and_answer_are_told_apart(inside: bool, answer: str, expected: list[Content]) -> None:
    assert think([answer], inside=inside) == expected
    assert think(list(answer), inside=inside) == expected
    for at in range(len(answer)):
        assert think([answer[:at], answer[at:]], inside=inside) == expected


@given(st.text(alphabet="<>/think \nx", max_size=60), st.integers(1, 7), st.booleans())
def test_pieces_of_any_size_give_the_same_and_lose_nothing(written: str, size: int, inside: bool) -> None:
    content = think([written], inside=inside)
    assert content == think([written[at : at + size] for at in range(0, len(written), size)], inside=inside)
    marks = written.replace("<think>", "").replace("</think>", "")
    said = "".join(part.text for part in content if isinstance(part, Text | Reasoning))
    assert sum(map(said.count, "ihnkx")) >= sum(map(marks.count, "ihnkx"))
    if not inside and not written.lstrip().startswith(("<think>", "</think>")):
        assert said == written


def test_marks_that_are_control_tokens() -> None:
    form = ReasoningFormat("[THINK]", "[/THINK]", "[/THINK]")
    controls = frozenset({"[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"})

    def magistral() -> ReasoningParser:
        return ReasoningParser(form, parser("mistral", controls=controls), inside=False, controls=controls)

    pieces = ["[THINK]", "hm [/THI", "NK] ", "[/THINK]", "Yes.", "[TOOL_CALLS]", "add", "[ARGS]", '{"a": 1}']
    assert read(magistral(), pieces) == [
        Reasoning("hm [/THINK]"),  # text that spells the token is none
        Text("Yes."),
        ToolCallStart(0, "call-0", "add"),
        ToolCallArguments(0, '{"a": 1}'),
        ToolCallEnd(0),
    ]
    begun = read(magistral(), ["[THINK]", "hm", "[TOOL_CALLS]", "add", "[ARGS]", "{}"])
    assert [type(part) for part in begun] == [Reasoning, ToolCallStart, ToolCallArguments, ToolCallEnd]


def test_calls_inside_reasoning_are_not_executed() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    reader = ReasoningParser(THINK, parser("hermes"), inside=True, controls=NONE)
    content = read(reader, list(f"I could write {call}.</think>\n\n{call}"))
    assert content[0] == Reasoning(f"I could write {call}.")
    assert [type(part) for part in content[1:]] == [ToolCallStart, ToolCallArguments, ToolCallEnd]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("<think>hm</think>\n<response>Yes.</response>\n", [Reasoning("hm"), Text("Yes.")]),
        ("<think>hm</think>\nYes.</response>", [Reasoning("hm"), Text("Yes.</response>")]),
        ("<think>hm</think><response>a </response> b", [Reasoning("hm"), Text("a </response> b")]),
        ("<think>hm</think><resp", [Reasoning("hm"), Text("<resp")]),
    ],
)
def test_marks_around_the_answer_are_taken_off(answer: str, expected: list[Content]) -> None:
    form = reasoning_format_of(GOLDEN["templates"]["ibm-granite-granite-3.3-2B-Instruct"]["source"])
    assert form is not None
    assert form.answer is not None
    assert think([answer], form=form) == think(list(answer), form=form) == expected


# Real templates -------------------------------------------------------------------------------------------------------

BEGINS = {
    "Apertus-8B-Instruct": "<|inner_prefix|>", "Bielik-11B-v3.0-Instruct": "<think>",
    "ByteDance-Seed-OSS": "<seed:think>", "GLM-4.6": "<think>", "GLM-4.7-Flash": "<think>",
    "HuggingFaceTB-SmolLM3-3B": "<think>", "MiniMax-M2": "<think>", "Qwen-QwQ-32B": "<think>",
    "Qwen-Qwen3-0.6B": "<think>", "Qwen3.5-4B": "<think>", "StepFun3.5-Flash": "<think>",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "<think>", "deepseek-ai-DeepSeek-V3.1": "<think>",
    "deepseek-ai-DeepSeek-V3.2": "<think>", "google-gemma-4-31B-it": "<|channel>",
    "ibm-granite-granite-3.3-2B-Instruct": "<think>", "llama-cpp-deepseek-r1": "<think>",
    "llama-cpp-rwkv-world": "<think>", "mistralai-Ministral-3-14B-Reasoning-2512": "[THINK]",
    "openai-gpt-oss-120b": HARMONY.begin,
}  # fmt: skip


def test_templates_tell_how_their_models_reason() -> None:
    found = {name: reasoning_format_of(golden["source"]) for name, golden in GOLDEN["templates"].items()}
    assert {name: form.begin for name, form in found.items() if form} == BEGINS


HELLO: Any = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("name", [name for name in BEGINS if name != "openai-gpt-oss-120b"])
@pytest.mark.parametrize("enabled", [True, False])
def test_an_answer_is_read_as_the_prompt_has_begun_it(name: str, enabled: bool) -> None:
    chat = ChatFormat(golden_template(name), NONE)
    form = chat.reasoning
    assert form is not None
    prompt = chat.render(HELLO, thinking=Thinking(enabled))
    make = chat.parser(None, prompt)
    opened = text(prompt).rstrip().endswith(form.begin)
    label = form.label + "\n" if form.label else ""
    begun = f"{label}hm{form.end}\n\nYes."
    expected: list[Content] = [Reasoning("hm"), Text("Yes.")]
    assert read(make(), [begun if opened else form.begin + begun]) == expected
    if opened:
        assert enabled or "enable_thinking" not in GOLDEN["templates"][name]["source"]
    else:
        assert read(make(), ["Yes."]) == [Text("Yes.")]


@pytest.mark.parametrize(
    ("name", "thinking", "shown"),
    [
        ("Qwen-Qwen3-0.6B", Thinking(False), "<think>\n\n</think>\n\n"),
        ("Qwen-Qwen3-0.6B", Thinking(effort="none"), "<think>\n\n</think>\n\n"),
        ("Qwen3.5-4B", None, "assistant\n<think>\n"),
        ("deepseek-ai-DeepSeek-V3.1", None, "<think>"),
        ("deepseek-ai-DeepSeek-V3.1", Thinking(False), "</think>"),
        ("openai-gpt-oss-120b", Thinking(effort="high"), "Reasoning: high"),
        ("openai-gpt-oss-120b", Thinking(effort="minimal"), "Reasoning: low"),
        ("ibm-granite-granite-3.3-2B-Instruct", Thinking(True), "Write your thoughts between <think></think>"),
        ("ByteDance-Seed-OSS", Thinking(budget=512), "512"),
        ("Mistral-Small-3.2-24B-Instruct-2506", None, "29"),  # strftime_now
    ],
)
def test_what_a_client_asks_reaches_the_template(name: str, thinking: Thinking | None, shown: str) -> None:
    prompt = text(ChatFormat(golden_template(name), NONE).render(HELLO, thinking=thinking))
    assert shown in prompt
    if thinking is None and shown.startswith("<think>"):
        assert prompt.endswith("<think>")


def test_the_clients_own_variables_win() -> None:
    chat = ChatFormat(golden_template("Qwen-Qwen3-0.6B"), NONE)
    prompt = text(chat.render(HELLO, thinking=Thinking(True), variables={"enable_thinking": False}))
    assert prompt.endswith("<think>\n\n</think>\n\n")

"""Tool calls in every format: however the text is cut, whatever only looks like a call, back from real templates."""

import codecs
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat import GOLDEN, golden_template
from tool_call_answers import ANSWERS, ARGUMENTS, TEXTS, TOOLS, at_marks, generated_calls, parser, read, schema_of

from everwarm.events import Answer, Content, Reasoning, Text, ToolCallArguments, ToolCallEnd, ToolCallStart
from everwarm.settings import Settings
from everwarm.text.detokenizer import Detokenizer
from everwarm.text.tokenizer import Tokenizer
from everwarm.text.tool_calls.formats import FORMATS, Arguments
from everwarm.text.tool_calls.parsers import PARSERS, call_parser, new_call_id, short_call_id
from everwarm.text.tool_calls.selection import format_of
from everwarm.weights.gguf.file import GGUFFile

NAMES = list(PARSERS)


def calls(content: list[Content]) -> list[tuple[str, Any]]:
    answer = Answer()
    answer.add(content)
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def text(content: list[Content]) -> str:
    return "".join(part.text for part in content if isinstance(part, Text))


# What the formats mean ------------------------------------------------------------------------------------------------


def test_every_format_has_a_parser_an_example_and_a_description() -> None:
    assert set(PARSERS) == set(FORMATS) == set(ANSWERS)


def test_every_format_can_be_chosen_by_the_setting() -> None:
    rules = {setting.name: setting for setting in dataclasses.fields(Settings)}["tool_parser"].metadata.values()
    assert [set(rule.choices) for rule in rules] == [{"auto", "none", *FORMATS}]


@pytest.mark.parametrize("name", NAMES)
def test_calls_and_the_text_around_them_are_told_apart(name: str) -> None:
    content = read(parser(name), [ANSWERS[name]])
    assert calls(content) == [("add", ARGUMENTS), ("now", {})]
    assert text(content) == ("Done." if name == "llama3" else "Let me see.Done.")


@pytest.mark.parametrize("name", NAMES)
def test_marks_that_are_control_tokens_are_read(name: str) -> None:
    marks = PARSERS[name].marks
    content = read(parser(name, controls=marks), at_marks(name, ANSWERS[name]))
    assert content == read(parser(name), [ANSWERS[name]])


@pytest.mark.parametrize("name", [name for name in NAMES if PARSERS[name].marks])
def test_text_that_spells_a_control_token_begins_no_call(name: str) -> None:
    answer = ANSWERS[name]
    content = read(parser(name, controls=PARSERS[name].marks), [answer])
    if name == "qwen3-coder":  # `<function=` is no token: it counts on its own
        return
    assert content == [Text(answer)]


@pytest.mark.parametrize("name", NAMES)
def test_a_description_writes_what_the_parser_reads(name: str) -> None:
    """A grammar that is derived from the description forces calls that are read as calls."""
    form = FORMATS[name]
    match form.arguments:
        case Arguments.JSON:
            arguments = '{"a": 1, "s": "x"}'
        case Arguments.PYTHON:
            arguments = 'a=1, s="x"'
        case Arguments.GEMMA:
            arguments = f"{{a:1,s:{form.quote}x{form.quote}}}"
        case Arguments.TAGGED:
            tags = form.tags
            assert tags is not None
            pairs = [("a", "1"), ("s", "x")]
            arguments = "".join(f"{tags.begin}{key}{tags.after_name}{value}{tags.end}" for key, value in pairs)
            if name == "deepseek-v3.2":
                arguments = arguments.replace('"a" string="true"', '"a" string="false"')
    one = f"{form.call_begin}add{form.after_name}{arguments}{form.call_end}"
    several = name not in ("harmony", "gigachat", "tool-code")
    written = form.calls_begin + form.separator.join([one] * (2 if several else 1)) + form.calls_end
    content = read(parser(name), [written])
    assert calls(content) == [("add", {"a": 1, "s": "x"})] * (2 if several else 1)
    assert not text(content)


# Where it is cut ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_cuts_at_every_byte_give_the_same_calls(name: str) -> None:
    answer = ANSWERS[name]
    whole = read(parser(name), [answer])
    for at in range(len(answer)):
        assert read(parser(name), [answer[:at], answer[at:]]) == whole
    decoder = codecs.getincrementaldecoder("utf-8")()
    assert read(parser(name), [decoder.decode(bytes([byte])) for byte in answer.encode()]) == whole


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    with GGUFFile(smollm2_path) as file:
        return Tokenizer.from_metadata(file.metadata)


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_of_a_real_vocabulary_give_the_same_calls(name: str, tokenizer: Tokenizer) -> None:
    """Cut at every token, and, with some tokens spelt in bytes, inside characters."""
    whole = read(parser(name), [ANSWERS[name]])
    for text in (ANSWERS[name], ANSWERS[name].replace("ü", "ü\u0300")):
        detokenizer = Detokenizer(tokenizer, continuing=True)
        pieces = [detokenizer.push(token) for token in tokenizer.encode(text)]
        found = read(parser(name), [*pieces, detokenizer.flush()])
        assert found == (whole if text == ANSWERS[name] else read(parser(name), [text]))


@pytest.mark.parametrize("name", NAMES)
def test_arguments_come_as_they_are_written(name: str) -> None:
    """The name comes before the arguments are complete, and arguments come in many pieces."""
    reader = parser(name)
    found = [part for character in ANSWERS[name] for part in reader.feed(character)]
    kinds = [type(part) for part in found if not isinstance(part, Text)]
    first_call = kinds[: kinds.index(ToolCallEnd)]
    assert first_call[0] is ToolCallStart
    assert first_call.count(ToolCallArguments) > (2 if FORMATS[name].arguments is Arguments.PYTHON else 10)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_may_end_anywhere(name: str) -> None:
    """Arguments that are given out as complete are complete; what is no call yet is text, to the last character."""
    answer = ANSWERS[name]
    for at in range(len(answer)):
        content = read(parser(name), [answer[:at]])
        ended = {part.index for part in content if isinstance(part, ToolCallEnd)}
        found = Answer()
        found.add(content)
        for number, call in enumerate(found.calls):
            if number in ended:
                assert json.loads(call.arguments) == (ARGUMENTS if call.name == "add" else {})
        if not found.calls and name != "harmony":
            assert text(content) == answer[:at]


# What is no call ------------------------------------------------------------------------------------------------------

FRAGMENTS = sorted(
    {mark for reader in PARSERS.values() for mark in (*reader.marks, *reader.openers)}
    | {"<function=", "<parameter=", ">", "{", "}", '"', "[", "]", "name", "add", '{"name": "add"', ', "arguments": ',
       ":", ",", "(", ")", "=", "\n", " ", "\\", "é", "👩", "'", "call:", "functions.", "json", "```", '<invoke name="'}
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60)
@given(pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=14), size=st.integers(1, 9), control=st.booleans())
def test_text_that_only_looks_like_a_call_loses_no_character(
    name: str, pieces: list[str], size: int, control: bool
) -> None:
    written = "".join(pieces)
    marks = PARSERS[name].marks if control else ()
    tokens = [piece for piece in at_marks(name, written) if piece] if control else [written]
    content = read(parser(name, controls=marks), tokens)
    small = [
        token[at : at + size] if token not in marks else token
        for token in tokens
        for at in range(0, 1 if token in marks else len(token), size)
    ]
    assert read(parser(name, controls=marks), small) == content
    if all(isinstance(part, Text) for part in content):
        if name != "harmony":
            assert text(content) == written
    else:
        _check_order(content)


@given(st.text(max_size=200))
def test_plain_text_stays_as_it_is(written: str) -> None:
    for name in NAMES:
        assert text(read(parser(name), [written])) == written


def _check_order(content: list[Content]) -> None:
    """As `everwarm.events` promises it."""
    open_: int | None = None
    count = 0
    for part in content:
        match part:
            case ToolCallStart():
                assert (open_, part.index) == (None, count)
                open_, count = count, count + 1
            case ToolCallArguments():
                assert part.index == open_
            case ToolCallEnd():
                assert part.index == open_
                open_ = None
            case Text() | Reasoning():
                assert open_ is None
                assert part.text


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("hermes", "Write <tool_call> before a call."),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "argumente": {"a": 1}}</tool_call>'),
        ("hermes", "<tool_call>[]</tool_call>"),
        ("hermes", '<tool_call>{"name": "two words", "arguments": {}}</tool_call>'),
        ("qwen3-coder", "<tool_call>\nadd\n</tool_call>"),
        ("qwen3-coder", "<function= a b >"),
        ("glm", "<tool_call> is a tag\nand text"),
        ("llama3", '{"name": "Ada", "parameters": {"age": 36}}'),  # no tool has this name
        ("llama3", 'Like {"name": "add", "parameters": {}}'),  # quoted
        ("llama3", "<|python_tag|>print('hello')"),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", "[TOOL_CALLS][ARGS]{}"),
        ("mistral", "[TOOL_CALLS]add[CALL_ID]this is no id[ARGS]{}"),
        ("tool-code", "```tool_code\nprint(add(a=1))\n```"),
        ("gemma", "<|tool_call>add{}<tool_call|>"),
        ("kimi", "<|tool_call_begin|>functions.add:0<|tool_call_end|>"),
        ("harmony", "Just text, with no header."),
    ],
)
def test_what_is_no_call_is_text(name: str, answer: str) -> None:
    assert read(parser(name), [answer]) == [Text(answer)]


@pytest.mark.parametrize(
    "header",
    [
        "Wait. <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json",
        "<|channel|>commentary Wait. to=functions.add json",
        "<|start|>assistant to=functions.add<|channel|>commentary Wait. code",
    ],
)
def test_other_words_in_a_header_of_harmony_are_text(header: str) -> None:
    found = Answer()
    found.add(read(parser("harmony"), [header + '<|message|>{"a": 1}<|call|>']))
    assert found.text == "Wait."
    assert [(call.name, call.arguments) for call in found.calls] == [("add", '{"a": 1}')]
    found = Answer()
    found.add(read(parser("harmony"), ["Wait.<|channel|>final<|message|> Yes.<|end|>"]))
    assert found.text == "Wait. Yes."


def test_many_false_beginnings_cost_bounded_time() -> None:
    answer = '<tool_call>{"x": "' * 20_000
    assert text(read(parser("hermes"), [answer])) == answer


# What models get wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "answer", "arguments"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"name": "add", "parameters": {"a": 1}}', {"a": 1}),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>', {"a": 1}),
        ("hermes", '<tool_call>{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}</tool_call>',
         {"a": 1}),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"s": "a\nb\\d\'\\\'"}}</tool_call>', {"s": "a\nb\\d''"}),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', {}),
        ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', {}),
        ("qwen3-coder", "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>", {"a": 1}),
        ("qwen3-coder", "<tool_call><function=add><parameter=any>True</parameter></function></tool_call>",
         {"any": True}),
        ("qwen3-coder", "<tool_call><function=add><parameter=any>one</parameter></function></tool_call>",
         {"any": "one"}),
        ("qwen3-coder", "<tool_call><function=add><parameter=s>12</parameter></function></tool_call>", {"s": "12"}),
        ("deepseek-v3.2", '<｜DSML｜function_calls><｜DSML｜invoke name="add">'
         '<｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>',
         {"a": 1}),
        ("deepseek-r1", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```', {"a": 1}),
        ("lfm2", "<|tool_call_start|>add(1, 'x')<|tool_call_end|>", {"a": 1, "s": "x"}),
        ("lfm2", '<|tool_call_start|>[{"name": "add", "arguments": {"a": 1}}]<|tool_call_end|>', {"a": 1}),
        ("lfm2", "<|tool_call_start|>[add(a=1, , s='x']<|tool_call_end|>", {"a": 1, "s": "x"}),
        ("lfm2", "<|tool_call_start|>[add(]<|tool_call_end|>", {}),
        ("llama3", '<|python_tag|>add.call(a=1, s="x")', {"a": 1, "s": "x"}),
        ("gemma", '<|tool_call>call:add{a: 1, s: "x"}<tool_call|>', {"a": 1, "s": "x"}),
    ],
)  # fmt: skip
def test_small_faults_are_forgiven(name: str, answer: str, arguments: dict[str, Any]) -> None:
    assert calls(read(parser(name), [answer])) == [("add", arguments)]
    assert calls(read(parser(name), list(answer))) == [("add", arguments)]
    assert name != "qwen3-coder" or not text(read(parser(name), [answer]))  # nor is an end mark left over


def test_broken_arguments_are_passed_on_up_to_the_end_mark() -> None:
    content = read(parser("hermes"), ['<tool_call>{"name": "add", "arguments": {"a": @1}}</tool_call>Done.'])
    arguments = [part.text for part in content if isinstance(part, ToolCallArguments)]
    assert arguments == ['{"a": @1}}']
    assert text(content) == "Done."


def test_a_tool_that_was_not_offered_is_called_all_the_same() -> None:
    content = read(parser("hermes"), ['<tool_call>{"name": "gone", "arguments": {}}</tool_call>'])
    assert calls(content) == [("gone", {})]


def test_a_tool_may_have_the_name_of_a_control_token() -> None:
    tools = {"<tool_call>": {}, "</tool_call>": {}, "<|im_end|>": {}}
    for name in tools:
        answer = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
        assert calls(read(parser("hermes", tools), [answer])) == [(name, {})]


def test_functions_inside_functions_end_no_generation() -> None:
    answer = "<tool_call>" + '{"function": ' * 20_000
    assert text(read(parser("hermes"), [answer])) == answer


@pytest.mark.parametrize("arguments", ["[" * 100_000, '{"a":' * 50_000, '{"a": NaN}', '{"a": 1e999}', "{" + "9" * 9999])
@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3", "gemma", "lfm2", "qwen3-coder"])
def test_hostile_arguments_end_no_generation(name: str, arguments: str) -> None:
    for answer in (
        f'<tool_call>{{"name": "add", "arguments": {arguments}',
        f'<tool_call>{{"arguments": {arguments}',
        f"[TOOL_CALLS]add[ARGS]{arguments}",
        f'{{"name": "add", "parameters": {arguments}',
        f"<|tool_call>call:add{{a:{arguments}",
        f"<|tool_call_start|>[add(a={arguments})",
        f"<tool_call><function=add><parameter=any>{arguments}</parameter></function>",
    ):
        content = read(parser(name), [answer])
        said = "".join(part.text for part in content if isinstance(part, Text | ToolCallArguments))
        assert said.count("[") + said.count("{") >= arguments.count("[") + arguments.count("{")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"s\\": \\"\\ud800\\"}"}</tool_call>'),
        ("gemma", '<|tool_call>call:add{"\\ud800": 1}<tool_call|>'),
        ("lfm2", "<|tool_call_start|>[add(s='\\ud800')]<|tool_call_end|>"),
    ],
)
def test_halves_of_characters_never_get_out(name: str, answer: str) -> None:
    content = read(parser(name, TOOLS | {"\ud800": {}}), [answer])
    assert repr(content).encode()
    assert "".join(part.text for part in content if isinstance(part, Text | ToolCallArguments)).encode()


ODD_SCHEMAS: tuple[Any, ...] = (
    {"type": 5}, {"type": {"a": 1}}, {"type": [[], 5]}, {"anyOf": 5}, {"oneOf": {"a": 1}}, {"anyOf": [5, {"type": 5}]},
    {"enum": 5}, 5, [], "string", None,
)  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
def test_schemas_that_are_none_end_no_generation(name: str) -> None:
    """They are the client's, and nobody has checked them where no grammar is made of them."""
    for odd in ODD_SCHEMAS:
        for tools in ({"add": {"properties": dict.fromkeys("asl", odd)}}, {"add": {"properties": odd}}):
            found = calls(read(parser(name, tools), [ANSWERS[name]]))
            assert found[0][1]["l"] == ARGUMENTS["l"]


# Ids ------------------------------------------------------------------------------------------------------------------


def test_ids_are_unique_and_as_templates_take_them() -> None:
    ids = {new_call_id() for _ in range(1000)}
    assert len(ids) == 1000
    assert all(id_.startswith("call_") and len(id_) == 29 for id_ in ids)
    assert all(len(id_) == 9 and id_.isalnum() for id_ in (short_call_id() for _ in range(100)))
    found = read(call_parser("mistral", TOOLS), ["[TOOL_CALLS]add[ARGS]{}"])[0]
    assert isinstance(found, ToolCallStart)
    assert len(found.id) == 9


# Real templates -------------------------------------------------------------------------------------------------------

EXPECTED = {
    "Apertus-8B-Instruct": "apertus", "Bielik-11B-v3.0-Instruct": "hermes", "ByteDance-Seed-OSS": "seed",
    "GLM-4.6": "glm", "GLM-4.7-Flash": "glm", "GigaChat3-10B-A1.8B": "gigachat", "HuggingFaceTB-SmolLM3-3B": None,
    "MiMo-VL": "hermes", "MiniMax-M2": "minimax", "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "Qwen-QwQ-32B": "hermes", "Qwen-Qwen2.5-7B-Instruct": "hermes", "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3-coder", "Qwen3.5-4B": "qwen3-coder", "StepFun3.5-Flash": "qwen3-coder",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek-r1", "deepseek-ai-DeepSeek-V3.1": "deepseek-v3.1",
    "deepseek-ai-DeepSeek-V3.2": "deepseek-v3.2", "google-gemma-4-31B-it": "gemma",
    "ibm-granite-granite-3.3-2B-Instruct": "granite", "ibm-granite-granite-4.0": "hermes",
    "ibm-granite-granite-4.1": "hermes", "gemma-shaped": None, "llama3-shaped": None, "olmo2-shaped": None,
    "phi4-shaped": None,
    "llama-cpp-deepseek-r1": "deepseek-r1", "llama-cpp-rwkv-world": None, "microsoft-Phi-3.5-mini-instruct": None,
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral", "mistralai-Mistral-Nemo-Instruct-2407": "mistral-json",
    "moonshotai-Kimi-K2": "kimi", "openai-gpt-oss-120b": "harmony", "unsloth-Apriel-1.5": "apriel",
}  # fmt: skip


def test_templates_tell_their_format() -> None:
    assert {name: format_of(golden["source"]) for name, golden in GOLDEN["templates"].items()} == EXPECTED


WRITERS = [
    name
    for name, golden in GOLDEN["templates"].items()
    if EXPECTED[name] and "get_weather" in (golden["texts"]["tool turn"] or "").rpartition("rich?")[2]
]
"""Templates that write the calls of earlier turns."""

CLOSING = ("</parameter>", "</arg_value>", '<|"|>')
ASK = {"role": "user", "content": "Do it."}


@pytest.mark.parametrize("template", WRITERS)
def test_calls_come_back_from_a_real_template(template: str) -> None:
    """300 calls: rendered as history, then read as an answer, they are what they were."""
    name = EXPECTED[template]
    assert name is not None
    chat = golden_template(template)
    for tool, arguments in generated_calls(300, TEXTS):
        properties = {key: schema_of(value) for key, value in arguments.items()}
        schema = {"type": "object", "properties": properties}
        function = {"name": tool, "description": "Does it", "parameters": schema}
        tools = [{"type": "function", "function": function}]
        call = {"id": "call00001", "type": "function", "function": {"name": tool, "arguments": arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        history = chat.render([ASK, said], tools=tools, add_generation_prompt=False)
        asked = "".join(segment.text for segment in chat.render([ASK], tools=tools, add_generation_prompt=False))
        reader = parser(name, {tool: schema}, (segment.text for segment in history if segment.special))
        at = 0
        pieces = []
        for segment in history:
            at += len(segment.text)
            if at > len(asked) and (not segment.special or segment.text in reader.control_tokens):
                pieces.append(segment.text[max(0, len(asked) - at + len(segment.text)) :])
        assert calls(read(reader, pieces)) == [(tool, arguments)], (template, "".join(pieces))

"""Exact replay: an answer that comes back in another dress keeps its tokens, and nothing else does."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import everwarm
from everwarm.events import Answer, End
from everwarm.generation.replay import canonical
from everwarm.kv.manifest import answer_places as places
from everwarm.kv.receipt import Receipt
from everwarm.llm import LLM
from everwarm.types import AnswerPlace, Segment
from output_parsers import Says
from tiny import Tiny

END = 258
"""The token `<|im_end|>` of a tiny model."""

HERMES = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['reasoning_content'] and loop.last %}{{ '<think>' + m['reasoning_content'] + '</think>' }}{% endif %}"
    "{{ m['content'] or '' }}"
    "{% for c in m['tool_calls'] or [] %}\n<tool_call>\n{\"name\": {{ c['function']['name'] | tojson }}, "
    "\"arguments\": {{ c['function']['arguments'] | tojson }}}\n</tool_call>{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "write", "description": "", "parameters": {"type": "object"}}},
]
ASKED = [{"role": "user", "content": "What is in it?"}]
CALL = '<tool_call>\n{"arguments":{"path":"a\\u00e9.txt","deep":[1,{"b":2.50,"a":null}]},"name":"look"}\n</tool_call>'
ARGUMENTS = {"deep": [1, {"a": None, "b": 2.5}], "path": "aé.txt"}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "tiny.gguf"
    Tiny(context=2048, template=HERMES).write(path)
    return path


@pytest.fixture
def llm(path: Path, home: Path) -> Iterator[LLM]:
    with everwarm.load(path) as llm:
        yield llm


def said(llm: LLM, messages: Sequence[Any], text: str, **options: Any) -> tuple[dict[str, Any], Receipt, list[int]]:
    """The model is made to say a text; the message that a client gets, the receipt, the tokens."""
    ids = [*llm.tokenize(text, special=True), END]
    constraint = partial(Says, ids, llm.config.vocab_size)
    answer, tokens = Answer(), []
    for event in llm.stream(messages=messages, tools=TOOLS, constraint=constraint, max_tokens=900, **options):
        if isinstance(event, End):
            return answer.message(), event.receipt, tokens
        answer.add(event.content)
        tokens.append(event.token)
    raise AssertionError


def called(arguments: str, content: str | None = None, name: str = "look") -> dict[str, Any]:
    """A call as a client sends it back, with an id of its own."""
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "x1", "type": "function", "function": function}],
    }


def history(llm: LLM, receipt: Receipt) -> list[int]:
    return llm.agents.history(llm.agents.find(receipt.agent)).ids


WHO = {"an agent": {"agent": "alice"}, "a group": {"group": "g"}, "nobody": {}}


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("restart", [False, True])
def test_calls_that_are_serialised_again_keep_their_tokens(path: Path, home: Path, who: str, restart: bool) -> None:
    options = WHO[who]
    llm = everwarm.load(path)
    answer, receipt, tokens = said(llm, ASKED, "Let me look. \n" + CALL, **options)
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    first = history(llm, receipt)
    assert first[-len(tokens) :] == tokens
    if restart:
        llm.close()
        llm = everwarm.load(path)
    with llm:
        messages = [*ASKED, called(json.dumps(ARGUMENTS), "Let me look."), {"role": "tool", "content": "nothing"}]
        _, receipt, tokens = said(llm, messages, " Nothing is in it.", **options)
        assert receipt.replayed_answers == 1
        assert (receipt.match, receipt.cached_tokens >= len(first) - 1) == ("extended", True)
        second = history(llm, receipt)
        assert second[: len(first)] == first
        # The client goes on in its own spelling, of both answers.
        messages += [{"role": "assistant", "content": "Nothing is in it."}, {"role": "user", "content": "Really?"}]
        _, receipt, tokens = said(llm, messages, "Yes.", **options)
        assert receipt.replayed_answers == 2
        assert receipt.cached_tokens >= len(second) - 1
        assert history(llm, receipt)[: len(second)] == second
        # What is computed from the kept tokens is what anybody computes from them.
        whole = history(llm, receipt)
        prompt = whole[: -len(tokens)]
        known = llm.generate(tokens=prompt, max_tokens=8, keep=False)
        assert known.cached_tokens == len(prompt) - 1
        assert known.tokens == llm.generate(tokens=prompt, max_tokens=8, cache=False).tokens


@pytest.mark.parametrize(
    "arguments",
    [
        json.dumps(ARGUMENTS | {"path": "b.txt"}),
        json.dumps(ARGUMENTS | {"deep": [1.0, {"a": None, "b": 2.5}]}),
        json.dumps(ARGUMENTS | {"deep": [True, {"a": None, "b": 2.5}]}),
        json.dumps(ARGUMENTS | {"deep": [{"a": None, "b": 2.5}, 1]}),
        json.dumps(ARGUMENTS)[:-1] + ', "path": "a\\u00e9.txt"}',
        json.dumps(ARGUMENTS | {"more": None}),
    ],
)
@pytest.mark.parametrize("who", ["an agent", "nobody"])
def test_an_edit_is_no_spelling(llm: LLM, arguments: str, who: str) -> None:
    said(llm, ASKED, CALL, **WHO[who])
    messages = [*ASKED, called(arguments), {"role": "tool", "content": "nothing"}]
    _, receipt, _ = said(llm, messages, "Nothing.", **WHO[who])
    assert receipt.replayed_answers == 0


@pytest.mark.parametrize(
    "message",
    [
        called(json.dumps(ARGUMENTS), name="write"),
        called(json.dumps(ARGUMENTS), "Some text."),
        {"role": "assistant", "content": "I called."},
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": json.dumps({"name": "look", "arguments": ARGUMENTS})},
    ],
)
def test_another_message_is_no_spelling(llm: LLM, message: dict[str, Any]) -> None:
    said(llm, ASKED, CALL, agent="alice")
    _, receipt, _ = said(llm, [*ASKED, message, {"role": "user", "content": "So?"}], "Nothing.", agent="alice")
    assert receipt.replayed_answers == 0


def test_duplicate_keys_of_the_model_are_never_read_into_a_client(llm: LLM) -> None:
    said(llm, ASKED, '<tool_call>\n{"name":"look","arguments":{"a":1,"a":2}}\n</tool_call>', agent="alice")
    messages = [*ASKED, called('{"a": 2}'), {"role": "tool", "content": "nothing"}]
    assert said(llm, messages, "Nothing.", agent="alice")[1].replayed_answers == 0


def test_control_tokens_that_no_client_sees_do_not_come_back(llm: LLM) -> None:
    answer, _, _ = said(llm, ASKED, "One <|im_start|>two. ", agent="alice")
    assert answer["content"] == "One two. "
    messages = [*ASKED, {"role": "assistant", "content": "One two."}, {"role": "user", "content": "So?"}]
    assert said(llm, messages, "Nothing.", agent="alice")[1].replayed_answers == 0


def test_a_call_that_was_written_without_its_tags(llm: LLM) -> None:
    """Leniently read; the template writes the tags. What the model wrote stays as it is."""
    _, receipt, _ = said(llm, ASKED, '{"name":"look","arguments":{"path":"b"}}', agent="alice")
    assert receipt.tool_format == "lenient"
    first = history(llm, receipt)
    messages = [*ASKED, called('{"path": "b"}'), {"role": "tool", "content": "nothing"}]
    _, receipt, _ = said(llm, messages, "Nothing.", agent="alice")
    assert receipt.replayed_answers == 1
    assert history(llm, receipt)[: len(first)] == first


def test_reasoning_does_not_come_back(llm: LLM) -> None:
    answer, receipt, _ = said(llm, ASKED, "<think>secret</think> Nothing. ", agent="alice")
    assert answer["reasoning_content"] == "secret"
    first = history(llm, receipt)
    messages = [*ASKED, answer, {"role": "user", "content": "Really?"}]
    _, receipt, _ = said(llm, messages, "Yes.", agent="alice")
    assert receipt.replayed_answers == 0
    second = history(llm, receipt)
    assert "secret" in llm.detokenize(first)
    assert "secret" not in llm.detokenize(second)


def test_nobody_reads_what_another_tenant_group_or_agent_has_said(llm: LLM) -> None:
    _, first, _ = said(llm, ASKED, CALL, group="g", tenant="one")
    messages = [*ASKED, called(json.dumps(ARGUMENTS)), {"role": "tool", "content": "nothing"}]
    for other in [{"group": "g", "tenant": "two"}, {"group": "h", "tenant": "one"}, {"agent": "a", "tenant": "one"}]:
        assert said(llm, messages, "Nothing.", **other)[1].replayed_answers == 0
    assert said(llm, messages, "Nothing.", group="g", tenant="one")[1].replayed_answers == 1
    assert first.agent


def test_without_the_cache_nothing_is_replayed(llm: LLM) -> None:
    said(llm, ASKED, CALL, agent="alice")
    messages = [*ASKED, called(json.dumps(ARGUMENTS)), {"role": "tool", "content": "nothing"}]
    _, receipt, _ = said(llm, messages, "Nothing.", cache=False)
    assert (receipt.replayed_answers, receipt.cached_tokens) == (0, 0)


def test_two_branches_of_one_conversation(llm: LLM) -> None:
    """The same question was answered in two ways: each goes on from its own."""
    other = CALL.replace("look", "write")
    said(llm, ASKED, CALL, group="g")
    said(llm, ASKED, other, group="g")
    for name in ("look", "write"):
        messages = [*ASKED, called(json.dumps(ARGUMENTS), name=name), {"role": "tool", "content": "nothing"}]
        _, receipt, _ = said(llm, messages, "Nothing.", group="g")
        assert receipt.replayed_answers == 1
        assert name in llm.detokenize(history(llm, receipt))


def test_a_conversation_that_is_taken_back_keeps_the_tokens_of_its_beginning(llm: LLM) -> None:
    """A client asks its last question anew, in other words: nobody's history is a beginning of that."""
    _, receipt, _ = said(llm, ASKED, CALL)
    first = history(llm, receipt)
    messages: list[Any] = [*ASKED, called(json.dumps(ARGUMENTS)), {"role": "tool", "content": "nothing"}]
    said(llm, messages, "Nothing.")
    messages[-1] = {"role": "tool", "content": "something"}
    _, receipt, _ = said(llm, messages, "Something.")
    assert (receipt.replayed_answers, receipt.match) == (1, "diverged")
    assert receipt.cached_tokens >= len(first) - 1
    assert history(llm, receipt)[: len(first)] == first


BARE = (
    "{% for m in messages %}{{ '<|im_start|>' + (m['content'] or '') + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
"""Its prompts end with a control token: an answer of nothing leaves no text between that and its end token."""


@pytest.mark.parametrize("who", WHO)
def test_an_answer_of_nothing_is_read_past(tmp_path: Path, home: Path, who: str) -> None:
    """By the next request, and by what is computed ahead, which ends before the model can be closed."""
    Tiny(context=2048, template=BARE).write(tmp_path / "tiny.gguf")
    nothing: Any = {"role": "assistant", "content": ""}
    with everwarm.load(tmp_path / "tiny.gguf") as llm:
        said(llm, ASKED, "", **WHO[who])
        said(llm, [*ASKED, nothing, {"role": "user", "content": "So?"}], "", **WHO[who])
        messages = [*ASKED, nothing, {"role": "user", "content": "And?"}]
        _, receipt, _ = said(llm, messages, "Nothing.", **WHO[who])
        assert receipt.replayed_answers == 0
        spelt = llm.detokenize(history(llm, receipt), special=True)
        assert spelt.endswith("<|im_start|><|im_end|><|im_start|>And?<|im_end|><|im_start|>Nothing.<|im_end|>")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def shuffled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: shuffled(value[key]) for key in reversed(value)}
    return [shuffled(item) for item in value] if isinstance(value, list) else value


@given(values, st.booleans(), st.sampled_from([None, 1, 3]))
def test_one_spelling_of_arguments(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = canonical(json.dumps(value))
    assert text is not None
    assert canonical(json.dumps(shuffled(value), ensure_ascii=ascii_only, indent=indent)) == text
    assert json.loads(text) == value


@given(values, values)
def test_other_arguments_are_spelt_otherwise(one: Any, other: Any) -> None:
    """`==` of Python does not tell 1, 1.0 and True apart; their types are told by their texts."""
    same = json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
    assert (canonical(json.dumps(one)) == canonical(json.dumps(other))) == same


@pytest.mark.parametrize("text", ['{"a":1,"a":1}', '[{"b":{"a":1,"a":1}}]', "NaN", "[Infinity]", "[1e400]", "-1e999"])
def test_odd_arguments_have_no_other_spelling(text: str) -> None:
    assert canonical(text) is None


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000, "*** Begin ***"])
def test_what_is_no_json_has_its_own_spelling_only(text: str) -> None:
    assert canonical(text) != canonical(text + " ")
    assert canonical(text) != canonical(json.dumps(text))


def test_places_of_answers() -> None:
    special, text = Segment("<s>", special=True), Segment("assistant\n")
    kept = [AnswerPlace("a", 1, 2), AnswerPlace("b", 3, 0)]
    assert places(kept, 2, [special, text, special, text])[0] == kept[0]
    assert len(places(kept, 2, [special, text, special, text])) == 2
    assert places(kept, 9, [special, text])[-1].run == 1
    assert places((), 0, [special, text])[-1].lead == len("assistant\n")
    assert places((), 0, [special])[-1] == AnswerPlace(places((), 0, [special, text])[-1].digest, 1, 0)
    assert len(places([AnswerPlace("a", 1, 0)] * 1000, 9, [special] * 9)) == 256

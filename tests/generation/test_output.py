"""From tokens to events: on the engine's thread, through the parser, into one queue."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import pytest

import everwarm
from everwarm.engine.sampler import SampledToken
from everwarm.engine.sampling import Sampling
from everwarm.errors import CancelledError
from everwarm.events import Content, End, Event, Failed, Reasoning, Text
from everwarm.generation.output import Output
from everwarm.generation.request import Request
from everwarm.llm import LLM
from everwarm.text.output_parser import OutputParser, PlainText
from output_parsers import ANSWER, CONTENT, Says, TagParser, joined
from tiny import Tiny

END, IM_START = 258, 257
TALK = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    home = tmp_path_factory.mktemp("output")
    Tiny(context=512).write(home / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVERWARM_HOME", str(home))
        with everwarm.load(home / "tiny.gguf", warm="on") as llm:
            yield llm


def says(llm: LLM, text: str) -> Callable[[], Says]:
    ids = [*llm.tokenize(text), END]
    return lambda: Says(ids, llm.config.vocab_size)


def events_of(
    llm: LLM, tokens: list[int], parser: Callable[[], OutputParser] = PlainText, **more: Any
) -> tuple[list[Event], Output]:
    """What becomes of these tokens."""
    queue: SimpleQueue[Any] = SimpleQueue()
    options: dict[str, Any] = {"max_tokens": 100, "stops": (), "context": 512} | more
    request = Request([1], Sampling(), end_ids=frozenset([END]), parser=parser, **options)
    output = Output(request, llm.tokenizer, [1], False, queue, queue)
    last = [output.accept(SampledToken(token, -0.5, ())) for token in tokens]
    assert last == [False] * (len(tokens) - 1) + [last[-1]]
    return [queue.get() for _ in tokens], output


def content(events: list[Event]) -> list[Content]:
    return joined([part for event in events for part in event.content])


def test_each_token_is_one_event(llm: LLM) -> None:
    events, _ = events_of(llm, [*b"abc", END])
    assert events == [
        *(Event(byte, -0.5, (), (Text(chr(byte)),)) for byte in b"abc"),
        Event(END, -0.5, (), (), "stop"),
    ]


def test_content_lags_behind_tokens_until_it_is_certain(llm: LLM) -> None:
    events, _ = events_of(llm, [*"äx!y".encode()], stops=("x?",), max_tokens=5)
    assert [event.text for event in events] == ["", "ä", "", "x!", "y"]
    assert [event.finish_reason for event in events] == [None] * 4 + ["length"]


def test_a_stop_string_ends_the_answer_and_is_named(llm: LLM) -> None:
    events, output = events_of(llm, [*b"abSTOP"], stops=("STOP",))
    assert (content(events), events[-1].finish_reason, events[-1].stop) == ([Text("ab")], "stop", "STOP")
    assert (output.finish_reason, output.stop) == ("stop", "STOP")


def test_the_parser_tells_content_apart_and_calls_are_the_finish_reason(llm: LLM) -> None:
    tokens = [*ANSWER.encode(), END]
    events, output = events_of(llm, tokens, TagParser)
    assert content(events) == CONTENT
    assert events[-1].finish_reason == output.finish_reason == "tool_calls"
    assert len(events) == len(tokens)


def test_what_the_parser_holds_back_comes_with_the_last_token(llm: LLM) -> None:
    events, _ = events_of(llm, [*b"a <cal"], TagParser, max_tokens=6)
    assert [event.text for event in events] == ["a", " ", "", "", "", "<cal"]
    events, _ = events_of(llm, [*b"a <cal", END], TagParser)
    assert events[-1].content == (Text("<cal"),)


def test_an_answer_that_is_cut_inside_a_call_ends_by_its_length(llm: LLM) -> None:
    events, output = events_of(llm, [*b'<call>f {"a"'], TagParser, max_tokens=12)
    assert (events[-1].finish_reason, output.answer.calls[0].arguments) == ("length", '{"a"')


def test_a_parser_reads_the_control_tokens_that_it_names(llm: LLM) -> None:
    tokens = [*b"x<", IM_START, *b"why", END]
    events, output = events_of(llm, tokens, TagParser)
    assert content(events) == [Text("x"), Reasoning("<why")]  # `<` may have become a tag until the text ended
    assert output.reasoning_tokens == 4
    assert content(events_of(llm, tokens)[0]) == [Text("x<why")]  # others leave them out


def test_text_that_spells_a_control_token_is_text(llm: LLM) -> None:
    events, _ = events_of(llm, [*b"a<|im_start|>b", END], TagParser)
    assert content(events) == [Text("a<|im_start|>b")]


def test_the_end_says_why_what_it_took_and_what_was_reused(llm: LLM) -> None:
    options = {"constraint": says(llm, ANSWER), "parser": TagParser, "max_tokens": 200}
    *events, end = llm.stream(messages=TALK, agent="a", **options)
    assert isinstance(end, End)
    assert content([event for event in events if isinstance(event, Event)]) == CONTENT
    assert (end.finish_reason, end.stop, end.receipt.committed) == ("tool_calls", None, True)
    assert end.usage.prompt_tokens == end.receipt.prompt_tokens == len(llm.encode_prompt(messages=TALK))
    assert end.usage.completion_tokens == len(events) == len(ANSWER.encode()) + 1
    # Tokens count as reasoning while it lasts, also those of the tag that ends it.
    assert end.usage.reasoning_tokens == len("hm, ä?</think>".encode())


def test_the_agent_remembers_reasoning_and_calls(llm: LLM) -> None:
    llm.generate(messages=TALK, agent="b", constraint=says(llm, ANSWER), parser=TagParser, max_tokens=200)
    message = llm.conversation("b")[-1]
    assert (message["content"], message["reasoning_content"]) == ("Let me see.  and ", "hm, ä?")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add", "now"]


def test_every_choice_has_a_parser_of_its_own(llm: LLM) -> None:
    made: list[TagParser] = []

    def make() -> TagParser:
        made.append(TagParser())
        return made[-1]

    first = llm.start(messages=TALK, constraint=says(llm, ANSWER), parser=make, max_tokens=200)
    queue: SimpleQueue[Event | End | Failed] = SimpleQueue()
    first.run(queue)
    first.another_choice(1, None).run(queue)
    items = [queue.get() for _ in range(queue.qsize())]
    for choice in (0, 1):
        *events, end = (item for item in items if item.choice == choice)
        assert isinstance(end, End)
        assert content([event for event in events if isinstance(event, Event)]) == CONTENT
    assert len(made) == 2


def test_a_queue_is_told_what_ended_a_generation(llm: LLM) -> None:
    queue: SimpleQueue[Event | End | Failed] = SimpleQueue()
    generation = llm.start("Hi", max_tokens=400, ignore_eos=True)
    generation.cancel()
    generation.run(queue)
    failed = queue.get()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, CancelledError)
    assert queue.empty()


def test_what_a_reader_leaves_behind_is_given_back_once(llm: LLM) -> None:
    _, output = events_of(llm, [*b"ab"])
    closed: list[int] = []
    held = ExitStack()
    held.callback(lambda: closed.append(1))
    output.abandon(held)
    output.give_back()  # the sequence still runs
    assert closed == []
    output.end(None)
    output.give_back()
    assert closed == [1]


class Reads(PlainText):
    """Names a control token of another vocabulary."""

    control_tokens = frozenset({"<|no_such_token|>", "<|im_start|>"})


def test_control_tokens_that_a_vocabulary_lacks_never_come(llm: LLM) -> None:
    assert content(events_of(llm, [*b"ab", IM_START, *b"c"], Reads)[0]) == [Text("abc")]


def test_a_stop_string_does_not_reach_across_a_control_token_that_is_read(llm: LLM) -> None:
    tokens = [*b"xS", IM_START, *b"TOP", END]
    assert content(events_of(llm, tokens, Reads, stops=("STOP",))[0]) == [Text("xSTOP")]
    assert content(events_of(llm, tokens[:-1], stops=("STOP",))[0]) == [Text("x")]  # nobody reads it: it is not there

"""Chat templates: the text that transformers renders, control tokens from the template only, no harm from any."""

import functools
import json
import lzma
import re
import threading
import tracemalloc
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everwarm.errors import TemplateError
from everwarm.text.chat import ChatTemplate
from everwarm.text.template.meter import Limits
from everwarm.types import Segment

GOLDEN = json.loads(lzma.decompress((Path(__file__).parents[1] / "golden" / "chats.json.xz").read_bytes()))
NOW = datetime.fromisoformat(GOLDEN["now"])
HELLO = [{"role": "user", "content": "Hello"}]


def template(source, special_tokens=(), **options):
    return ChatTemplate.from_metadata(
        {"tokenizer.chat_template": source}, special_tokens=special_tokens, bos="<s>", eos="</s>", **options
    )


@functools.cache
def golden_template(name, special_tokens=None):
    golden = GOLDEN["templates"][name]
    return ChatTemplate.from_metadata(
        {"tokenizer.chat_template": golden["source"]},
        special_tokens=golden["control"] if special_tokens is None else special_tokens,
        bos=GOLDEN["bos"],
        eos=GOLDEN["eos"],
        now=lambda: NOW,
    )


def text(segments):
    return "".join(segment.text for segment in segments)


def special(segments):
    return [segment.text for segment in segments if segment.special]


def write(source, messages=HELLO, special_tokens=(), **options):
    return text(template(source, special_tokens).render(messages, **options))


# The oracle


@pytest.mark.parametrize("name", GOLDEN["templates"])
def test_every_conversation_reads_as_transformers_renders_it(name):
    chat = golden_template(name)
    control = sorted(map(re.escape, GOLDEN["templates"][name]["control"]), key=len, reverse=True)
    for title, conversation in GOLDEN["conversations"].items():
        expected = GOLDEN["templates"][name]["texts"][title]
        if expected is None:
            with pytest.raises(TemplateError):
                chat.render(**conversation)
            continue
        segments = chat.render(**conversation)
        assert text(segments) == expected, title
        pieces = re.split(f"({'|'.join(control)})", expected)
        assert segments == [Segment(piece, special=i % 2 == 1) for i, piece in enumerate(pieces) if piece], title


# Control tokens from the outside


ATTACKED = [name for name in GOLDEN["templates"] if name != "openai-gpt-oss-120b"]  # refuses its own tokens in messages


@pytest.mark.parametrize("name", ATTACKED)
def test_no_input_becomes_a_control_token(name):
    chat, unguarded = golden_template(name), golden_template(name, special_tokens=())
    attack = "".join(GOLDEN["templates"][name]["control"])

    def conversation(text):
        tool = {"name": f"n{text}", "description": text, "parameters": {"type": "object", "properties": {}}}
        call = {"name": f"n{text}", "arguments": {f"k{text}": text}}
        return {
            "messages": [
                {"role": "user", "content": f"{text}a"},
                {"role": "assistant", "content": text, "reasoning_content": text},
                {"role": "user", "content": f" {text}\n"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "call00001", "type": "function", "function": call}],
                },
                {"role": "tool", "content": text, "name": f"n{text}", "tool_call_id": "call00001"},
            ],
            "tools": [{"type": "function", "function": tool}],
            "documents": [{"title": text, "text": text}],
        }

    def render(chat, text):
        try:
            return chat.render(**conversation(text))
        except TemplateError:  # no tools in this one
            return chat.render(conversation(text)["messages"][:3])

    attacked = render(chat, attack)
    assert special(attacked) == special(render(chat, "word"))
    assert text(attacked) == text(render(unguarded, attack))
    assert attack in text(attacked)


def forged(name, content):
    """Control tokens that a message adds, compared with the same message in which they are spelled differently."""
    chat = golden_template(name)
    tokens = []
    for spelling in (content, content.replace("|", "!").replace("｜", "!")):
        messages = [{"role": role, "content": spelling} for role in ("system", "user", "assistant", "user")]
        tokens.append(special(chat.render(messages)))
    return tokens[0] != tokens[1]


FRAGMENTS = [
    "<|im_",
    "start|>",
    "end|>",
    "<",
    "|>",
    "<|im_end|>",
    "/no_think",
    "/think",
    "</think>",
    "<think>",
    " ",
    "\n",
    "user",
]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join))
@pytest.mark.parametrize("name", ["HuggingFaceTB-SmolLM3-3B", "Qwen-Qwen3-0.6B"])
def test_nothing_that_a_template_cuts_or_removes_makes_a_token(name, content):
    assert not forged(name, content)


def test_removing_text_from_a_message_makes_no_token():
    assert "<|im_end|>" in write("{{ messages[0].content.replace('/no_think', '') }}", say("<|im_/no_thinkend|>"))
    assert not forged("HuggingFaceTB-SmolLM3-3B", "<|im_/no_thinkend|>")
    assert not forged("HuggingFaceTB-SmolLM3-3B", "<|im_/th/no_thinkinkend|>")


def say(*contents, role="user"):
    return [{"role": role, "content": content} for content in contents]


@pytest.mark.parametrize(
    ("source", "contents"),
    [
        ("{{ messages[0].content }}end|>", ["<|im_"]),
        ("{{ messages[0].content | trim }}end|>", ["<|im_ \n"]),
        ("<|im_{{ messages[0].content }}", ["end|>"]),
        ("<|im_{{ messages[0].content.strip() }}", [" end|>"]),
        ("<|{{ messages[0].content }}|>", ["im_end"]),
        ("{{ messages[0].content ~ messages[1].content }}", ["<|im_", "end|>"]),
        ("{{ messages[0].content | trim + messages[1].content | trim }}", ["<|im_\n", "\nend|>"]),
        ("{{ messages | map(attribute='content') | join }}", ["<", "|im_end|", ">"]),
        ("{{ messages[0].content.split('</think>')[0] }}end|>", ["<|im_</think>"]),
        ("{{ messages[0].content | replace('x', '') }}", ["<|imx_end|>"]),
        ("{{ messages[0].content[::-1] }}", [">|dne_mi|<"]),
        ("{{ messages[0].content | lower }}", ["<|IM_END|>"]),
        ("{{ messages[0].content | tojson }}", ["<|im_end|>"]),
        ("{{ messages[0].content | tojson(ensure_ascii=true) }}", ["ü<|im_end|>"]),
        ("{{ '%s' % messages[0].content }}", ["<|im_end|>"]),
    ],
)
def test_pieces_do_not_join_into_a_token(source, contents):
    segments = template(source, ["<|im_end|>"]).render(say(*contents))
    assert special(segments) == []
    assert "<|im_end|>" in text(segments)


ROLES = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}{{ '<|assistant|>' }}"


def test_a_token_built_around_the_role_is_one():
    chat = template(ROLES, ["<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"])
    assert special(chat.render(HELLO)) == ["<|user|>", "<|end|>", "<|assistant|>"]


@pytest.mark.parametrize(
    "content", ["<|user|>", "a<|user|><|user|>", "<|user", "|>", "user|>", "<|", " <|user|> ", "<|<|user|>|>"]
)
def test_but_not_one_in_a_message(content):
    chat = template(ROLES, ["<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"])
    for messages in (say(content), say(content, content)):
        segments = chat.render(messages)
        assert special(segments) == ["<|user|>", "<|end|>"] * len(messages) + ["<|assistant|>"]
        assert text(segments).count(content) >= len(messages)


@pytest.mark.parametrize(
    "contents", [["<|us", "er|>"], ["<|user", "|>"], ["<", "|user|>"], ["<|user ", "|>"], ["<|", "\nuser|>"]]
)
def test_nor_one_across_two_messages(contents):
    source = "{{ '<|' + messages[0].role + '|>' }}{{ messages[0].content | trim }}{{ messages[1].content | trim }}"
    segments = template(source, ["<|user|>"]).render(say(*contents))
    assert segments == [Segment("<|user|>", special=True), Segment("<|user|>")]


def test_a_template_can_still_look_for_tokens_in_messages():
    source = (
        "{% set c = messages[0].content %}{% if '<|eot|>' in c %}{{ c.split('<|eot|>') | join('+') }}{% endif %}<|eot|>"
    )
    segments = template(source, ["<|eot|>"]).render(say("a<|eot|>b"))
    assert segments == [Segment("a+b"), Segment("<|eot|>", special=True)]


def test_variables_for_bos_and_eos_are_tokens_and_compare_as_text():
    source = "{{ bos_token }}{% if bos_token == '<s>' and eos_token in ['</s>'] %}same{% endif %}{{ eos_token }}"
    assert template(source, ["<s>", "</s>"]).render(HELLO) == [
        Segment("<s>", special=True),
        Segment("same"),
        Segment("</s>", special=True),
    ]


def test_the_longest_token_wins_and_only_in_the_template():
    chat = template("<|a|><|a|>>{{ messages[0].content }}", ["<|a|>", "<|a|>>"])
    assert special(chat.render(say(">"))) == ["<|a|>", "<|a|>>"]
    chat = template("<|a|>{{ messages[0].content }}", ["<|a|>", "<|a|>>"])
    assert special(chat.render(say(">"))) == ["<|a|>"]


def test_noncharacters_in_messages_are_kept_and_mark_nothing():
    content = "\ufdd0<|a|>\ufdd1 \ufdd2 \ufdd5"
    chat = template("<|a|>{{ messages[0].content }}", ["<|a|>"])
    assert chat.render(say(content)) == [Segment("<|a|>", special=True), Segment(content)]
    with pytest.raises(TemplateError, match="noncharacters"):
        chat.render(say("".join(map(chr, range(0xFDD0, 0xFDF0)))))


# What templates are offered


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}", "user\n"),
        (
            "{% for i in range(9) %}{% if i==2 %}{% continue %}{% elif i>3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "013",
        ),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hello!"),
        ("{{ {'b': '<ü>', 'a': [1, none]} | tojson }}", '{"b": "<ü>", "a": [1, null]}'),
        (
            "{{ {'b': 'ü😀', 'a': 1} | tojson(ensure_ascii=true, sort_keys=true, separators=(',', ':')) }}",
            '{"a":1,"b":"\\u00fc\\ud83d\\ude00"}',
        ),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ strftime_now('%d %b %Y') }}", "29 Feb 2024"),
        ("{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% for k, v in {'a': 1} | items %}{{ k ~ v }}{% endfor %}", "a1"),
        ("{% macro m(x) %}[{{ x }}{{ varargs }}]{% endmacro %}{{ m(1, 2) }}", "[1(2,)]"),
        ("{{ ', '.join(messages | map(attribute='role')) }}", "user"),
        ("{{ '%s-%03d' % ('a', 7) }}{{ '{}-{:>3}'.format('a', 7) }}{{ '%s' | format(1) }}", "a-007a-  71"),
        ("{{ tools is none and documents is none and add_generation_prompt }}", "True"),
        ("{{ undefined_name }}|{{ messages[0].nothing }}", "|"),
        ("{% for x in [1, 2, 3] if x != 2 %}{{ loop.index }}/{{ loop.length }}:{{ x }} {% endfor %}", "1/2:1 2/2:3 "),
        ("{{ dict(a=1).a }}{{ 'abc'[1:] }}{{ 2 ** 10 }}{{ 'ab' * 2 }}", "1bc1024abab"),
    ],
)
def test_the_language_is_that_of_transformers(source, expected):
    assert text(template(source, now=lambda: NOW).render(HELLO)) == expected


def test_variables_reach_the_template():
    chat = template("{{ enable_thinking }}{{ documents[0].text }}{{ tools[0].name }}")
    assert (
        text(chat.render(HELLO, enable_thinking=False, documents=[{"text": "d"}], tools=[{"name": "t"}])) == "Falsedt"
    )
    assert chat.variables() == {"enable_thinking", "documents", "tools"}


def test_the_template_for_tools_is_used_for_tools():
    metadata = {
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "T",
        "tokenizer.chat_template": "D",
    }
    chat = ChatTemplate.from_metadata(metadata, special_tokens=[], bos="", eos="")
    assert text(chat.render(HELLO)) == "D"
    assert text(chat.render(HELLO, tools=[{"name": "x"}])) == "T"
    del metadata["tokenizer.chat_template"]
    assert text(ChatTemplate.from_metadata(metadata, special_tokens=[], bos="", eos="").render(HELLO)) == "T"


def test_without_a_template_chatml_needs_its_tokens():
    chat = ChatTemplate.from_metadata({}, special_tokens=["<|im_start|>", "<|im_end|>"], bos="", eos="")
    assert text(chat.render([*HELLO, {"role": "assistant", "content": None}, *HELLO])) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    with pytest.raises(TemplateError, match=r"no chat template.*--raw"):
        ChatTemplate.from_metadata({}, special_tokens=["<s>"], bos="<s>", eos="")


def test_parts_are_joined_for_templates_that_read_text_and_made_for_those_that_read_parts():
    two = say([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert write("{{ messages[0].content }}", two) == "a\nb"
    assert write("{{ messages[0].content | tojson }}", two) == '"a\\nb"'
    parts = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    assert write(parts, two) == "<a><b>"
    assert write(parts) == "<Hello>"


def test_arguments_are_given_as_the_template_wants_them():
    def called(arguments):
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        return [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}]

    body = "{% for m in messages %}{% for c in m.tool_calls %}{{ ARGUMENTS }}{% endfor %}{% endfor %}"
    as_object = body.replace("ARGUMENTS", "c.function.arguments | tojson")
    as_text = body.replace("ARGUMENTS", "'=' + c.function.arguments")
    for arguments in ({"a": "ü"}, '{"a": "ü"}'):
        assert write(as_object, called(arguments)) == '{"a": "ü"}'
        assert write(as_text, called(arguments)) == '={"a": "ü"}'
    assert write(as_object, called("not json")) == '"not json"'


def test_reasoning_is_found_under_its_three_names():
    source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert write(source, [{"role": "assistant", "content": "a", name: "r"}]) == "rr"


def test_threads_share_a_template():
    chat = template("{% for m in messages %}{{ m.content }}{% endfor %}")
    results = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: text(chat.render(say(str(n) * 1000)))}))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: str(n) * 1000 for n in range(8)}


# What is refused


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("Hello", "messages: expected a list, found str"),
        ([], "messages: the list is empty"),
        (["Hello"], r"messages\[0\]: expected an object"),
        ([*HELLO, {"content": "x"}], r"messages\[1\]: the role is missing"),
        ([{"role": 1, "content": "x"}], r"messages\[0\]: the role is missing"),
        (say(5), r"messages\[0\]\.content: expected a text or a list of parts, found int"),
        (say(b"x"), r"messages\[0\]\.content: .* found bytes"),
        (say([5]), r"messages\[0\]\.content\[0\]: expected a part"),
        (say([{"type": "text"}]), r"messages\[0\]\.content\[0\]: .* needs a text"),
        (
            say([{"type": "image_url", "image_url": {"url": "x"}}]),
            r"content\[0\]: parts of type 'image_url' can't be read",
        ),
        (say([{"type": "riddle", "riddle": "x"}]), r"reads no parts of type 'riddle'"),
        ([{"role": "user", "content": "x", "extra": {1}}], r"messages\[0\]\.extra: expected JSON data, found set"),
        ([{"role": "user", "content": {1: 2}}], r"messages\[0\]\.content: expected texts as keys"),
    ],
)
def test_bad_messages_are_named(messages, reason):
    with pytest.raises(TemplateError, match=reason):
        template("{{ messages[0].content }}").render(messages)


def test_bad_tools_and_endless_data_are_named():
    chat = template("{{ tools }}")
    with pytest.raises(TemplateError, match="tools: expected a list of objects"):
        chat.render(HELLO, tools=["x"])
    deep = []
    deep.append(deep)
    with pytest.raises(TemplateError, match="nested more than 64 deep"):
        chat.render(HELLO, documents=[{"x": deep}])


def test_a_refusal_of_the_template_is_passed_on_in_one_line():
    chat = template("{{ raise_exception('roles must\n  alternate') if messages | length > 1 }}")
    with pytest.raises(TemplateError, match=r"^the chat template refuses these messages: roles must alternate$"):
        chat.render([*HELLO, *HELLO])


def test_errors_name_the_line():
    with pytest.raises(TemplateError, match=r"^chat template, line 2: .*endfor"):
        template("{% if x %}\n{% endfor %}")
    with pytest.raises(TemplateError, match=r"^chat template, line 3: "):
        write("\n{% if true %}\n{{ messages[7].content.text }}\n{% endif %}")
    with pytest.raises(TemplateError, match=r"tokenizer\.chat_template: expected a text, found int"):
        template(5)


GROW = "{% set ns = namespace(x=START) %}{% for i in range(70) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"


def grow(start, step):
    return GROW.replace("START", start).replace("STEP", step)


HOSTILE = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loop that skips": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "loop that writes": "{% set s %}{% for i in range(99999) %}" + 9999 * "x" + "{% endfor %}{% endset %}",
    "product": "{{ 'a' * 10**9 }}",
    "constant product": "{{ 1000000000 * 'a' }}",
    "product of lists": "{{ [1] * 10**9 }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "squares": grow("9", "ns.x * ns.x"),
    "sum of texts": grow("'aa'", "ns.x + ns.x"),
    "joined texts": grow("'aa'", "ns.x ~ ns.x"),
    "join filter": grow("'aa'", "[ns.x, ns.x] | join"),
    "join method": grow("'aa'", "ns.x.join([ns.x, ns.x, ns.x])"),
    "replace method": "{% set a = 'a' * 9999 %}{{ a.replace('a', a).replace('a', a) }}",
    "replace filter": "{% set a = 'a' * 9999 %}{{ a | replace('a', a) | replace('', a) }}",
    "lists of lists": grow("[1]", "[ns.x, ns.x]"),
    "tuples of tuples": grow("(1,)", "(ns.x, ns.x)"),
    "dicts of dicts": grow("{}", "{'a': ns.x, 'b': ns.x}"),
    "dict function": grow("{}", "dict(a=ns.x, b=ns.x)"),
    "views": grow("{'a': 1}", "{'a': ns.x.items(), 'b': ns.x.items()}"),
    "mapped default": grow("[1]", "range(9999) | map('default', ns.x, true) | list"),
    "filled batch": grow("[1]", "[1] | batch(9999, ns.x)"),
    "arguments": "{% macro m(n) %}{{ m(n - 1, varargs, varargs) if n else varargs }}{% endmacro %}{{ m(70, 1, 2) }}",
    "format width": "{{ '%1000000000d' % 1 }}",
    "format star": "{{ '%*d' % (1000000000, 1) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "nested format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "center": "{{ 'a'.center(10**9) }}",
    "center filter": "{{ 'a' | center(10**9) }}",
    "indent": "{{ 'a' | indent(10**9, true) }}",
    "json indent": "{{ [1] | tojson(indent=10**9) }}",
    "round": "{{ 1.5 | round(10**9, 'floor') }}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "translate": "{{ ('a' * 9999).translate({97: 'a' * 9999}) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "bytes": "{{ (5).to_bytes(10**9, 'big') }}",
    "strip": "{% set a = 'a' * 99999 %}{{ a.strip('b' * 99999 ~ 'a') }}",
    "search from the right": "{% set a = 'a' * 99999 %}{{ a.rfind('b' ~ 'a' * 49999) }}",
    "endless macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "exploding macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(70) }}",
    "endless loop": "{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
    "endless block": "{% block a %}{{ self.a() }}{% endblock %}",
    "class": "{{ ''.__class__.__mro__ }}",
    "class by filter": "{{ (messages | attr('__class__')).x }}",
    "globals": "{{ raise_exception.__globals__['sys'] }}",
    "cycler": "{{ cycler.__init__.__globals__ }}",
    "namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "lipsum": "{{ lipsum(10**9) }}",
    "changed input": "{{ messages.append(1) }}",
    "include": "{% include 'other' %}",
    "parentheses": "{{ " + 5000 * "(" + "1" + 5000 * ")" + " }}",
    "deep sum": "{{ " + "+".join(9999 * "1") + " }}",
    "deep loops": 30 * "{% for a in [1] %}" + 30 * "{% endfor %}",
    "long": (1 << 18) * "x",
    "division": "{{ 1 // 0 }}",
    "large numbers": "{% set f = ('f' * 99999) | int(0, 16) %}{{ f % (('f' * 50001) | int(0, 16)) }}",
    "numbers of one hash": "{{ range(0, 40000 * (2**61 - 1), 2**61 - 1) | unique | list | length }}",
    "sum of lists": "{% set l = range(8000) | batch(1) | list %}{{ l | sum(start=[]) | length }}",
    "format of dates": "{{ strftime_now('%c' * 9999) }}",
    "chain of filters": grow("'ab'", "ns.x | map('upper')").replace("70", "9999"),
    "nested arguments": (
        "{% set ns = namespace(x=()) %}{% macro m() %}{% set ns.x = varargs %}{% endmacro %}"
        "{% for i in range(9999) %}{% if m(ns.x) %}{% endif %}{% endfor %}{{ {ns.x: 1} | length }}"
    ),
    "nested items": (
        "{% set ns = namespace(x=1) %}"
        "{% for i in range(9999) %}{% for p in {ns.x: 1}.items() %}{% set ns.x = p %}{% endfor %}{% endfor %}"
    ),
    "search from the right in much": "{% set a = 'a' * 99999 %}{{ a.rfind('b' ~ 'a' * 2999) }}",
    "constant that can't be": "{{ {[]: 1} }}",
    "loop over a constant": "{% for i in range(99999) %}{{ 'a' * 99999 }}{% endfor %}",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_in_one_line(name):
    limits = Limits(seconds=0.1, value=1 << 17, volume=1 << 20)
    with pytest.raises(TemplateError) as error:
        template(HOSTILE[name], limits=limits).render(HELLO)
    assert "\n" not in str(error.value)


HUNGRY = {
    "center": "{{ ('a' | safe).center(10**8) | length }}",
    "center by keyword": "{{ ('a' | safe).center(width=10**8) | length }}",
    "ljust": "{{ ('a' | escape).ljust(10**8) | length }}",
    "join": "{{ (('a' * 99999) | safe).join(range(2000) | map('string')) | length }}",
    "replace": "{{ (('a' * 999) | safe).replace('a', 'b' * 99999) | length }}",
    "slices": "{% set x = 'a' * 99999 %}" + "".join(f"{{% set a{i} = x[{i + 1}:] %}}" for i in range(2000)),
    "format of dates": "{{ strftime_now('%50000000d' ~ 'x' * 99999) | length }}",
    "output": "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
    "pieces": "{% set o = '<|a|>'[0] ~ 'x' %}{% for i in range(999) %}{{ o * 999 }}{% endfor %}",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", HUNGRY)
def test_hungry_templates_are_refused_before_they_take_memory(name):
    limits = Limits(seconds=1, value=1 << 17, volume=1 << 22, output=1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError):
            template(HUNGRY[name], ["<|a|>"], limits=limits).render(HELLO)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


class SteppingClock:
    """A millisecond passes with each look at it."""

    def __init__(self):
        self.looks = 0

    def __call__(self):
        self.looks += 1
        return self.looks / 1000


@pytest.fixture
def clock(monkeypatch):
    stepping = SteppingClock()
    monkeypatch.setattr("everwarm.text.template.meter.monotonic", stepping)
    monkeypatch.setattr("everwarm.text.template.meter.thread_time", lambda: stepping.looks / 1000)
    return stepping


def test_one_deadline_for_everything_that_is_tried_with_a_template(clock):
    once = "{% for i in range(200) %}{% endfor %}{{ messages[0].content }}"
    assert write(once) == "Hello"
    most = clock.looks
    with pytest.raises(TemplateError, match="ran for more than 1 s"):
        template(once, limits=Limits(seconds=1))
    assert clock.looks - most < 1100


@pytest.mark.parametrize("operation", ["a // b", "a == b", "b in c", "a < b < a", "c[1:]", "a % b", "-a + b"])
def test_every_operation_that_may_take_long_looks_at_the_clock(operation, clock):
    """Many of them in one tuple, which counts by itself only when it is made."""
    source = "{% set a = 9**99 %}{% set b = 7**77 %}{% set c = [1] * 99 %}"
    source += "{% set t = (" + ", ".join([operation] * 900) + ") %}{{ messages[0].content }}"
    chat = template(source, limits=Limits(seconds=1000))
    before = clock.looks
    chat.render(HELLO)
    assert clock.looks - before > 900


@pytest.mark.parametrize(
    ("source", "tokens"),
    [
        ("ab" * 30000, ["ab"]),
        ("a" * 30000, ["a" * size for size in range(2, 257)]),
        ("".join(f"{{{{ 'x{i}<' }}}}{{{{ '>y{i}' }}}}" for i in range(999)), [f"<{i}>" for i in range(999)]),
        ("{{ messages[0].content }}{{ '<|' + messages[0].role + '|>' }}", ["<|user|>"]),
    ],
)
def test_marking_control_tokens_counts(source, tokens, clock):
    """All that is done about control tokens looks at the clock, in proportion to the text."""
    with pytest.raises(TemplateError, match=r"ran for more than 0\.5 s"):
        template(source, tokens, limits=Limits(seconds=0.5, seconds_per_input=0)).render(say("<|user|>" * 9999))


def test_control_tokens_have_a_greatest_length_and_number():
    with pytest.raises(TemplateError, match=r"control token 'aaa.*'\.\.\. has 257 characters, at most 256"):
        template("a", ["a" * 257])
    assert special(template("b" * 256, ["b" * 256]).render(HELLO)) == ["b" * 256]
    with pytest.raises(TemplateError, match="262,145 control tokens, at most 262,144"):
        template("a", map(str, range((1 << 18) + 1)))


@pytest.mark.timeout(60)
def test_a_message_full_of_tokens_that_are_built_from_pieces_costs_little():
    content = "<|user|>" * 100_000
    segments = template(ROLES, ["<|user|>", "<|assistant|>", "<|end|>"]).render(say(content))
    assert segments[1] == Segment(content)


def test_arguments_nested_too_deep_stay_text():
    for depth in (70, 100_000):
        arguments = '{"a":' * depth + "1" + "}" * depth
        calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
        messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": calls}]
        calls_of = "{% for m in messages %}{% for c in m.tool_calls %}CALL{% endfor %}{% endfor %}"
        written = write(calls_of.replace("CALL", "{{ c.function.arguments | tojson }}"), messages)
        assert json.loads(written) == arguments


def test_a_refused_template_is_not_tried_again(clock):
    costly = "{% for i in range(99999) %}{% endfor %}"
    metadata = {"tokenizer.chat_template": "D", "tokenizer.chat_template.tool_use": costly}
    chat = ChatTemplate.from_metadata(metadata, special_tokens=[], bos="", eos="")
    for _ in range(3):
        before = clock.looks
        with pytest.raises(TemplateError, match="ran for more than 5 s"):
            chat.render(HELLO, tools=[{"name": "x"}])
    assert clock.looks == before


@pytest.mark.timeout(60)
def test_a_long_key_is_not_copied_for_everything_below_it():
    messages = [{"role": "user", "content": "x", "k" * 1_000_000: [1] * 1_000_000}]
    assert write("{{ messages[0].content }}", messages) == "x"


def test_sums_are_those_of_jinja():
    assert write("{{ [1, 2, 3] | sum }}") == "6"
    assert write("{{ [[1], [2, 3]] | sum(start=[]) }}{{ [{'a': 2}, {'a': 3}] | sum(attribute='a') }}") == "[1, 2, 3]5"


def test_namespaces_that_hold_each_other_have_a_short_name():
    assert write(grow("1", "namespace(a=ns.x, b=ns.x)")) == "<Namespace>"


def test_long_conversations_are_not_taken_for_attacks():
    chat = golden_template("Qwen-Qwen3-0.6B")
    messages = [{"role": role, "content": "lorem <ipsum> " * 500} for role in ["user", "assistant"] * 250]
    assert len(text(chat.render(messages))) > 3_000_000

"""Prompts that go on from a history: what was computed keeps its ids, what is new gets those of the tokenizer."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.kv.manifest import merged
from everwarm.text.chat import ChatTemplate
from everwarm.text.history import Prompt, answer_runs, tokenise, wanted_runs
from everwarm.text.tokenizer import Tokenizer
from everwarm.types import Run, Segment
from everwarm.weights.gguf.file import GGUFFile
from text.test_sentencepiece import SPACE, metadata
from tiny import CHATML, byte_alphabet

PIECES = {SPACE: -3.0, "ab": -2.0, SPACE + "a": -1.0, "a": -4.0, "b": -4.0, SPACE + SPACE: -1.5, "c": -4.0}


def sentencepiece(name: str = "llama") -> Tokenizer:
    """`phi-3` is the model whose special tokens swallow the space after them."""
    data = metadata(PIECES, add_bos_token=True)
    data["tokenizer.ggml.tokens"] += ["<|user|>", "<|end|>"]
    data["tokenizer.ggml.token_type"] += [3, 3]
    data["tokenizer.ggml.scores"] += [0.0, 0.0]
    return Tokenizer.from_metadata(data | {"general.name": name})


def byte_pairs(merges: Sequence[str] = ("z q",)) -> Tokenizer:
    """The 256 bytes, three control tokens, and what is merged."""
    tokens = [*byte_alphabet(), "<|endoftext|>", "<|im_start|>", "<|im_end|>", *("".join(m.split()) for m in merges)]
    return Tokenizer.from_metadata(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if token.startswith("<|") else 1 for token in tokens],
            "tokenizer.ggml.merges": list(merges),
            "tokenizer.ggml.eos_token_id": 258,
        }
    )


def chatml(tokenizer: Tokenizer, messages: Sequence[tuple[str, str]], source: str = CHATML) -> list[Segment]:
    template = ChatTemplate.from_metadata(
        {"tokenizer.chat_template": source}, special_tokens=tokenizer.special_tokens, bos="", eos="<|im_end|>"
    )
    return template.render([{"role": role, "content": content} for role, content in messages])


def answered(tokenizer: Tokenizer, prompt: Prompt, answer: list[int]) -> tuple[tuple[Run, ...], list[int]]:
    """The history after a turn, as the store keeps it."""
    control = set(tokenizer.special_tokens.values())
    runs = merged((*prompt.runs, *answer_runs(tokenizer, answer, continuing=prompt.ids[-1] not in control)))
    assert sum(run.tokens for run in runs) == len(prompt.ids) + len(answer)
    return runs, [*prompt.ids, *answer]


START, END = Segment("<|im_start|>", special=True), Segment("<|im_end|>", special=True)
segments_of = {
    "sentencepiece": ["<|user|>", "<|end|>", "<s>"],
    "phi-3": ["<|user|>", "<|end|>", "<s>"],
    "byte pairs": ["<|im_start|>", "<|im_end|>"],
}
TOKENIZERS = {"sentencepiece": sentencepiece(), "phi-3": sentencepiece("phi-3"), "byte pairs": byte_pairs()}
plain = st.text(st.sampled_from("abzq \n\u00e9"), min_size=1, max_size=6).map(Segment)


def tokenised(
    tokenizer: Tokenizer, segments: Sequence[Segment], add_bos: bool, runs: Sequence[Run] = (), ids: Sequence[int] = ()
) -> Prompt:
    return tokenise(tokenizer, wanted_runs(segments, add_bos), runs, ids)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, list[Segment]]:
    kind = draw(st.sampled_from(sorted(TOKENIZERS)))
    special = st.sampled_from([Segment(name, special=True) for name in segments_of[kind]])
    return kind, draw(st.lists(st.one_of(plain, special), min_size=1, max_size=12))


@given(conversations())
def test_without_a_history_the_ids_are_the_tokenizers(conversation: tuple[str, list[Segment]]) -> None:
    kind, segments = conversation
    tokenizer = TOKENIZERS[kind]
    prompt = tokenised(tokenizer, segments, tokenizer.add_bos)
    assert prompt.ids == tokenizer.encode(segments, add_bos=tokenizer.add_bos)
    assert sum(run.tokens for run in prompt.runs) == len(prompt.ids)
    assert prompt.diverged_at_char is None


@given(conversations(), st.data())
def test_a_history_that_ends_at_a_special_token_changes_no_id(
    conversation: tuple[str, list[Segment]], data: st.DataObject
) -> None:
    """It was tokenised as it would be now, so going on from it is the same as beginning anew; no BOS in the middle."""
    kind, segments = conversation
    tokenizer = TOKENIZERS[kind]
    cuts = [at for at, segment in enumerate(segments) if at and (segment.special or segments[at - 1].special)]
    cut = data.draw(st.sampled_from(cuts)) if cuts else len(segments)
    before = tokenised(tokenizer, segments[:cut], tokenizer.add_bos)
    after = tokenised(tokenizer, segments, tokenizer.add_bos, merged(before.runs), before.ids)
    assert after.ids == tokenizer.encode(segments, add_bos=tokenizer.add_bos)
    assert after.ids[: len(before.ids)] == before.ids
    assert after.diverged_at_char is None
    assert after.ids[1:].count(1) == sum(segment.text == "<s>" for segment in segments) or kind == "byte pairs"


@pytest.mark.parametrize("tail", [[258], []], ids=["ended", "cut off"])
def test_an_answer_keeps_its_ids_where_the_tokenizer_would_spell_it_otherwise(tail: list[int]) -> None:
    tokenizer = byte_pairs()
    z, q = tokenizer.encode("z")[0], tokenizer.encode("q")[0]
    assert len(tokenizer.encode("zq")) == 1
    first = tokenised(tokenizer, chatml(tokenizer, [("user", "hi")]), add_bos=False)
    runs, ids = answered(tokenizer, first, [z, q, *tail])
    said = [("user", "hi"), ("assistant", "zq"), ("user", "more")]
    second = tokenised(tokenizer, chatml(tokenizer, said), False, runs, ids)
    assert second.ids[: len(ids)] == ids
    assert second.diverged_at_char is None
    new = tokenizer.encode(chatml(tokenizer, said))
    assert second.ids[len(ids) :] == new[len(ids) - 1 :]  # one token fewer before: z and q are merged there
    assert second.ids != new


def test_half_a_character_keeps_its_id() -> None:
    """What is read as U+FFFD and sent back as such was another byte."""
    tokenizer = byte_pairs()
    half = tokenizer.encode("\u00e9")[0]
    first = tokenised(tokenizer, chatml(tokenizer, [("user", "hi")]), add_bos=False)
    runs, ids = answered(tokenizer, first, [half])
    said = [("user", "hi"), ("assistant", "\ufffd"), ("user", "more")]
    assert tokenised(tokenizer, chatml(tokenizer, said), False, runs, ids).ids[: len(ids)] == ids


def test_text_is_cut_at_special_tokens_only() -> None:
    """Where text goes on from text, all of it is tokenised again: `zq` is one token across the seam."""
    tokenizer = byte_pairs()
    first = tokenised(tokenizer, [Segment("az")], add_bos=False)
    second = tokenised(tokenizer, [Segment("azqb")], False, first.runs, first.ids)
    assert second.ids == tokenizer.encode("azqb")
    assert second.ids[:2] != first.ids


def test_a_text_that_only_grows_has_not_diverged() -> None:
    tokenizer = byte_pairs()
    first = tokenised(tokenizer, [START, Segment("az")], add_bos=False)
    assert tokenised(tokenizer, [START, Segment("azqb")], False, first.runs, first.ids).diverged_at_char is None
    assert tokenised(tokenizer, [START, Segment("a")], False, first.runs, first.ids).diverged_at_char is None
    assert tokenised(tokenizer, [START], False, first.runs, first.ids).diverged_at_char is None


@pytest.mark.parametrize(
    ("segments", "character"),
    [
        ([START, Segment("user\nhi"), END, Segment("\n"), START, Segment("assistant\nno")], 52),
        ([START, Segment("user\nho"), END, Segment("\n"), START, Segment("assistant\nyes")], 18),
        ([Segment("user\nhi"), END, Segment("\n")], 0),
        ([START, Segment("user\nhi"), START], 24),
        ([START, Segment("user\nhi and more"), END], 19),
    ],
)
def test_the_character_at_which_a_prompt_leaves_its_history_is_named(segments: list[Segment], character: int) -> None:
    tokenizer = byte_pairs()
    said = [START, Segment("user\nhi"), END, Segment("\n"), START, Segment("assistant\nyes"), END]
    first = tokenised(tokenizer, said, add_bos=False)
    second = tokenised(tokenizer, segments, False, merged(first.runs), first.ids)
    assert second.diverged_at_char == character
    old, new = ("".join(segment.text for segment in part) for part in (said, segments))
    assert character == next(at for at, (a, b) in enumerate(zip(old, new, strict=False)) if a != b)
    assert second.ids == tokenizer.encode(segments)


def test_a_template_that_drops_the_thinking_of_earlier_turns_is_noticed_where_it_does() -> None:
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = byte_pairs()
    first = tokenised(tokenizer, chatml(tokenizer, [("user", "hi")], source), add_bos=False)
    runs, ids = answered(tokenizer, first, [*tokenizer.encode("<think>hm</think>yes"), 258])
    said = [("user", "hi"), ("assistant", "<think>hm</think>yes"), ("user", "more")]
    segments = chatml(tokenizer, said, source)
    second = tokenised(tokenizer, segments, False, runs, ids)
    rendered = "".join(segment.text for segment in segments)
    assert second.diverged_at_char == rendered.index("assistant\nyes") + len("assistant\n")
    assert second.ids == tokenizer.encode(segments)


def test_a_sentencepiece_answer_reads_as_it_will_be_rendered() -> None:
    """The space that begins a piece after a special token is not part of the text; after a text it is."""
    tokenizer = sentencepiece()
    user, end = Segment("<|user|>", special=True), Segment("<|end|>", special=True)
    a = tokenizer.encode("a")  # a piece with its space
    assert len(a) == 1
    first = tokenised(tokenizer, [user, Segment("b"), end], add_bos=True)
    runs, ids = answered(tokenizer, first, [*a, tokenizer.special_tokens["<|end|>"]])
    assert runs[-2].text == "a"
    following = [user, Segment("b"), end, Segment("a"), end, user, Segment("c")]
    second = tokenised(tokenizer, following, True, runs, ids)
    assert second.ids == tokenizer.encode(following, add_bos=True)
    assert second.ids[: len(ids)] == ids
    runs, ids = answered(tokenizer, tokenised(tokenizer, [Segment("b")], add_bos=True), a)
    assert runs[-1].text == "b a"


def test_white_space_that_a_special_token_swallows_stays_in_the_text_and_out_of_the_ids() -> None:
    tokenizer = sentencepiece("phi-3")
    user = Segment("<|user|>", special=True)
    prompt = tokenised(tokenizer, [user, Segment(" \n ab")], add_bos=True)
    assert prompt.ids == tokenizer.encode([user, Segment("ab")], add_bos=True)
    assert prompt.runs[-1].text == " \n ab"
    again = tokenised(tokenizer, [user, Segment(" \n ab"), user], True, prompt.runs, prompt.ids)
    assert again.ids[: len(prompt.ids)] == prompt.ids


@pytest.mark.model
def test_conversations_with_smollm2s_own_tokenizer(smollm2_path: Path) -> None:
    """Answers spelt a character at a time keep their ids turn after turn; the rest has the tokenizer's."""
    file = GGUFFile(smollm2_path)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    template = ChatTemplate.from_metadata(
        file.metadata, special_tokens=tokenizer.special_tokens, bos="<|im_start|>", eos="<|im_end|>"
    )
    messages: list[dict[str, str]] = []
    runs: tuple[Run, ...] = ()
    ids: list[int] = []
    for turn, text in enumerate(
        ["The quick brown fox", "caf\u00e9 12345", "  def f(x):\n    return x", "\U0001f98a the"]
    ):
        messages.append({"role": "user", "content": f"Say it {turn} times"})
        segments = template.render(messages)
        prompt = tokenised(tokenizer, segments, tokenizer.add_bos, runs, ids)
        assert prompt.diverged_at_char is None
        assert prompt.ids[: len(ids)] == ids
        assert tokenizer.decode(prompt.ids, special=True) == "".join(segment.text for segment in segments)
        letters = [id_ for letter in text for id_ in tokenizer.encode(letter)]
        assert letters != tokenizer.encode(text)
        runs, ids = answered(tokenizer, prompt, [*letters, tokenizer.special_tokens["<|im_end|>"]])
        messages.append({"role": "assistant", "content": text})
    assert ids != tokenizer.encode(template.render(messages, add_generation_prompt=False))[: len(ids)]
    file.close()

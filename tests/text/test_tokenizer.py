"""Tokenizers of many families against llama.cpp, and the promises of `Tokenizer` itself."""

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.errors import TokenizerError
from everwarm.model.architectures import ARCHITECTURES
from everwarm.text.bpe import BYTE_ALPHABET
from everwarm.text.tokenizer import Tokenizer
from everwarm.types import Segment
from everwarm.weights.gguf.file import GGUFFile
from golden.token_digests import deviations, digest, digests, families, read
from text.nasty import nasty_strings

MODES = {"plain": False, "special": True}


@cache
def tokenizer(family: str) -> Tokenizer:
    return Tokenizer.from_metadata(read(family).metadata)


COMPARED = {
    "llama": ("llama-bpe", "llama-spm", "smollm2", "mistral-v3", "tekken", "deepseek-coder", "deepseek-llm"),
    "qwen2": ("qwen2.5",),
    "qwen2moe": ("qwen2.5",),
    "qwen3": ("qwen3",),
    "qwen3moe": ("qwen3",),
    "gemma2": ("gemma3",),
    "gemma3": ("gemma3",),
    "gemma4": ("gemma4",),
    "granite": ("refact", "starcoder", "granite-4"),
    "granitemoe": ("refact", "granite-4"),
    "phi3": ("phi-3", "olmo2"),
    "smollm3": ("smollm3",),
    "mistral3": ("tekken",),
    "glm4": ("glm4",),
    "glm4moe": ("glm4",),
    "olmo2": ("olmo2",),
    "gpt-oss": ("gpt-oss",),
    "deepseek2": ("deepseek-llm", "deepseek-v3", "glm4"),
    "granitehybrid": ("granite-4",),
    "qwen3next": ("qwen3",),
    "qwen35": ("qwen35",),
    "qwen35moe": ("qwen35",),
    "lfm2": ("llama-bpe",),
    "lfm2moe": ("llama-bpe",),
    "falcon-h1": ("llama-bpe",),
    "nemotron_h": ("tekken",),
    "nemotron_h_moe": ("tekken",),
    "mamba2": ("gpt-2",),
}
"""For each architecture, golden files with the tokenizers that its models have."""


def test_a_tokenizer_of_every_architecture_was_compared() -> None:
    assert COMPARED.keys() == ARCHITECTURES.keys()
    for compared in COMPARED.values():
        assert {name for name in compared if name != "smollm2"} <= set(families())


def check_ids(ours: Tokenizer, family: str, mode: str) -> None:
    found = digests(ours.encode(text, special=MODES[mode]) for text in nasty_strings())
    pairs = zip(nasty_strings(), found, read(family).digests[mode], strict=True)
    wrong = [text for text, a, b in pairs if a != b and text not in deviations(family, mode)]
    assert not wrong, f"{len(wrong)} of {len(found)} strings, the first is {wrong[0]!a}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", families())
def test_ids_are_llama_cpps(family: str, mode: str) -> None:
    check_ids(tokenizer(family), family, mode)


@pytest.mark.model
@pytest.mark.parametrize("mode", MODES)
def test_ids_of_the_demo_model_are_llama_cpps(smollm2_path: Path, mode: str) -> None:
    with GGUFFile(smollm2_path) as file:
        check_ids(Tokenizer.from_metadata(file.metadata), "smollm2", mode)


@pytest.mark.parametrize("family", families())
def test_facts_are_llama_cpps(family: str) -> None:
    ours, facts = tokenizer(family), read(family).facts
    assert (-1 if ours.bos_id is None else ours.bos_id, ours.eos_id) == (facts["bos_id"], facts["eos_id"])
    assert sorted(ours.eog_ids) == facts["eog_ids"]
    assert (ours.add_bos, ours.add_eos) == (facts["add_bos"], facts["add_eos"])


OTHER_BYTES = {
    "command-r": "some of its tokens are not written in the byte alphabet, which confuses llama.cpp",
    "gpt-oss": "llama.cpp shows tokens such as <|start|> where control tokens are not shown",
}


@pytest.mark.parametrize("family", [name for name in families() if name not in OTHER_BYTES])
def test_bytes_of_tokens_are_llama_cpps(family: str) -> None:
    ours = tokenizer(family)
    for special, expected in zip((False, True), read(family).facts["pieces"], strict=True):
        pieces = [ours.token_bytes(id_, special=special) for id_ in range(ours.vocab_size)]
        assert digest(b"\0".join(pieces)) == expected


@pytest.mark.parametrize("family", families())
def test_nasty_strings_survive(family: str) -> None:
    ours = tokenizer(family)
    for text in nasty_strings():
        assert ours.decode(ours.encode(text)) == what_can_survive(ours, text)


@given(st.text(), st.sampled_from(families()))
def test_any_text_survives(text: str, family: str) -> None:
    ours = tokenizer(family)
    assert ours.decode(ours.encode(text)) == what_can_survive(ours, text)


@given(st.lists(st.sampled_from(["<|im_end|>", "<|im_start|>", "x", " ", "\n", "<|", "|>"]), max_size=8))
def test_split_loses_nothing_and_is_what_special_means(parts: list[str]) -> None:
    ours, text = tokenizer("qwen2.5"), "".join(parts)
    segments = ours.split(text)
    assert "".join(segment.text for segment in segments) == text
    assert all(segment.special == (segment.text in ours.special_tokens) for segment in segments)
    assert ours.encode(segments) == ours.encode(text, special=True)


def test_control_tokens_in_plain_text_are_spelled_out() -> None:
    for family in families():
        ours = tokenizer(family)
        control = set(ours.special_tokens.values())
        for name in ours.special_tokens:
            assert control.isdisjoint(ours.encode(f"a{name}b {name}\n"))


def test_neighbouring_plain_segments_are_one_text() -> None:
    ours = tokenizer("qwen2.5")
    segments = [Segment("<|im_start|>", special=True), Segment("hel"), Segment("lo wor"), Segment("ld")]
    assert ours.encode(segments) == [ours.special_tokens["<|im_start|>"], *ours.encode("hello world")]


def test_segments_that_look_special_but_are_not_marked() -> None:
    ours = tokenizer("qwen2.5")
    assert ours.encode([Segment("<|im_end|>")]) == ours.encode("<|im_end|>") != ours.encode("<|im_end|>", special=True)


def test_unknown_special_segment_is_an_error() -> None:
    with pytest.raises(TokenizerError, match=r"'<\|nope\|>' is no control token"):
        tokenizer("qwen2.5").encode([Segment("<|nope|>", special=True)])


def test_phi3_swallows_white_space_after_special_tokens() -> None:
    ours = tokenizer("phi-3")
    user = Segment("<|user|>", special=True)
    assert ours.encode([user, Segment(" \n\tx")]) == ours.encode([user, Segment("x")])
    assert ours.encode("<|user|> \n\tx", special=True) == ours.encode("<|user|>x", special=True)


def test_bos_is_added_on_demand() -> None:
    ours = tokenizer("llama-bpe")
    assert ours.add_bos
    assert ours.encode("x", add_bos=True) == [ours.bos_id, *ours.encode("x")]


def test_lone_surrogates_are_encoded_as_replacement_characters() -> None:
    for family in ("gpt-2", "llama-spm"):
        ours = tokenizer(family)
        assert ours.encode("a\ud800b\udfff") == ours.encode("a\ufffdb\ufffd")


@pytest.mark.parametrize("bad", [-1, 1 << 40])
def test_ids_out_of_range_are_errors(bad: int) -> None:
    ours = tokenizer("gpt-2")
    for call in (lambda: ours.decode([0, bad]), lambda: ours.token_bytes(bad), lambda: ours.token_text(bad)):
        with pytest.raises(TokenizerError, match=rf"token {bad}: no id of this vocabulary \(0 to 1,112\)"):
            call()


def test_control_tokens_are_decoded_on_demand() -> None:
    ours = tokenizer("qwen2.5")
    ids = ours.encode("a<|im_end|>b", special=True)
    assert ours.decode(ids) == "ab"
    assert ours.decode(ids, special=True) == "a<|im_end|>b"


def small(**changes: Any) -> dict[str, Any]:
    """A tiny byte-level vocabulary; `None` takes a key away."""
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [*BYTE_ALPHABET, "ab", "<|im_end|>"],
        "token_type": [1] * 257 + [3],
        "merges": ["a b"],
        "eos_token_id": 257,
    }
    fields |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, r"tokenizer\.ggml\.model is missing"),
        ({"model": "bert"}, r"tokenizer\.ggml\.model: 'bert' is not supported \(known: gpt2, llama, gemma4\)"),
        ({"pre": "gpt-7"}, r"tokenizer\.ggml\.pre: 'gpt-7' is not supported \(known: "),
        ({"tokens": None}, r"tokenizer\.ggml\.tokens is missing"),
        ({"tokens": "abc"}, r"tokenizer\.ggml\.tokens: an array expected"),
        ({"tokens": [1, 2]}, r"tokenizer\.ggml\.tokens: an array of strings expected"),
        ({"tokens": ["a", "b", "a"], "token_type": None}, r"tokens 0 and 2 have the same text 'a'"),
        ({"merges": None}, r"tokenizer\.ggml\.merges is missing"),
        ({"token_type": [1, 1]}, r"tokenizer\.ggml\.token_type: 2 entries for 258 tokens"),
        ({"token_type": ["x"] * 258}, r"tokenizer\.ggml\.token_type: an array of numbers expected"),
        ({"token_type": [1000] * 258}, r"tokenizer\.ggml\.token_type: small integers expected"),
        ({"eos_token_id": 258}, r"tokenizer\.ggml\.eos_token_id: 258 is no id of this vocabulary \(0 to 257\)"),
        ({"bos_token_id": -1}, r"tokenizer\.ggml\.bos_token_id: -1 is no id"),
        ({"bos_token_id": "x"}, r"tokenizer\.ggml\.bos_token_id: 'x' is no id"),
        ({"add_bos_token": 1}, r"tokenizer\.ggml\.add_bos_token: true or false expected"),
        (
            {"tokens": [*BYTE_ALPHABET, "ab", "<" * 257]},
            r"tokenizer\.ggml\.tokens: special token 257 has 257 characters, at most 256",
        ),
    ],
)
def test_broken_metadata_are_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_metadata(small(**changes))


def test_missing_pretokenizer_is_default_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ours = Tokenizer.from_metadata(small(pre=None))
    assert "using 'default'" in caplog.text
    assert ours.encode("ab 1234") == Tokenizer.from_metadata(small(pre="default")).encode("ab 1234")


def test_missing_bos_is_none_and_no_guess() -> None:
    """llama.cpp takes token 11 for BOS and EOS then: Falcon's, but a comma elsewhere."""
    ours = Tokenizer.from_metadata(small(eos_token_id=None))
    assert (ours.bos_id, ours.eos_id, ours.eog_ids) == (None, None, {257})
    with pytest.raises(TokenizerError, match="no BOS"):
        ours.encode("x", add_bos=True)


def test_missing_types_make_named_tokens_control_tokens_all_the_same() -> None:
    ours = Tokenizer.from_metadata(small(token_type=None))
    assert ours.special_tokens == {"<|im_end|>": 257}


@pytest.mark.parametrize("kinds", [[1, 1], [3, 4], [4], [6]])
def test_tokens_without_text_do_no_harm(kinds: list[int]) -> None:
    tokens = [*BYTE_ALPHABET, "ab", "<|im_end|>", *[""] * len(kinds)]
    ours = Tokenizer.from_metadata(small(tokens=tokens, token_type=[1] * 257 + [3, *kinds]))
    assert ours.decode(ours.encode("xab<|im_end|>", special=True), special=True) == "xab<|im_end|>"


def test_texts_that_are_no_utf8_in_the_file() -> None:
    tokens = [*BYTE_ALPHABET, "ab", "<|im_end|>", b"\xff\xfe".decode("utf-8", "surrogateescape")]
    ours = Tokenizer.from_metadata(small(tokens=tokens, token_type=[1] * 257 + [3, 4], merges=["a b"]))
    assert ours.encode("ab") == [256]
    assert ours.token_bytes(258) == b"\xff\xfe"


def test_first_of_equal_merges_counts() -> None:
    tokens = [*BYTE_ALPHABET, "ab", "bc", "<|im_end|>"]
    ours = Tokenizer.from_metadata(
        small(tokens=tokens, token_type=[1] * 258 + [3], merges=["a b", "b c", "a b"], eos_token_id=258)
    )
    assert ours.encode("abc") == [256, BYTE_ALPHABET.index("c")]


def test_merges_that_make_no_token_are_left_out() -> None:
    ours = Tokenizer.from_metadata(small(merges=["x y", "a b", "<|im_end| >"]))
    assert ours.encode("xyab") == [BYTE_ALPHABET.index("x"), BYTE_ALPHABET.index("y"), 256]


def test_merges_that_make_a_control_token_are_left_out() -> None:
    """Also by way of tokens that a hostile file has made of its parts."""
    name = "<|" + "x" * 100 + "|>"
    tokens = [*BYTE_ALPHABET, *(name[:size] for size in range(2, len(name))), name]
    merges = [f"{name[: size - 1]} {name[size - 1]}" for size in range(2, len(name) + 1)]
    kinds = [1] * (len(tokens) - 1) + [3]
    ours = Tokenizer.from_metadata(
        small(tokens=tokens, token_type=kinds, merges=merges, pre="default", eos_token_id=len(tokens) - 1)
    )
    assert len(tokens) - 1 not in ours.encode(name)
    assert ours.encode(name, special=True) == [len(tokens) - 1]


def test_bytes_without_a_token_are_dropped_but_separate() -> None:
    tokens = [character for character in BYTE_ALPHABET if character != "-"] + ["ab", "<|im_end|>"]
    ours = Tokenizer.from_metadata(small(tokens=tokens, token_type=[1] * 256 + [3], eos_token_id=256))
    assert [ours.token_text(id_) for id_ in ours.encode("a-b ab")] == ["a", "b", "\u0120", "ab"]


def test_harmony_end_closes_a_message_but_not_the_turn() -> None:
    names = ["<|end|>", "<|return|>", "<|call|>", "<|start|>"]
    tokens = [*BYTE_ALPHABET, "ab", "<|im_end|>", *names]
    ours = Tokenizer.from_metadata(small(tokens=tokens, token_type=[1] * 257 + [3] * 5, eos_token_id=259))
    assert {ours.token_text(id_) for id_ in ours.eog_ids} == {"<|im_end|>", "<|return|>", "<|call|>"}
    assert set(names) <= ours.special_tokens.keys()


# Gemma 4: pairs of characters

LINE_FEEDS = ["\n", "\n\n"]


def characters(**changes: Any) -> dict[str, Any]:
    """A tiny vocabulary like Gemma 4's; `None` takes a key away."""
    control = ["<pad>", "<eos>", "<bos>", "<|tool_response>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["\u2581", "a", "b", "ab", "\u2581a", "\u2581ab", "b\u2581a", *LINE_FEEDS, "</s>", "<", "/", "s", ">"]
    fields: dict[str, Any] = {
        "model": "gemma4",
        "tokens": [*control, *byte_tokens, *words],
        "token_type": [3] * len(control) + [6] * len(byte_tokens) + [1] * len(words),
        "merges": ["a b", "\u2581 a", "\u2581 ab", "b \u2581a"],
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    fields |= changes
    return {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value is not None}


def texts_of(ours: Tokenizer, text: str, **options: Any) -> list[str]:
    return [ours.token_text(id_) for id_ in ours.encode(text, **options)]


def test_characters_are_merged_by_rank_and_spaces_are_u2581() -> None:
    ours = Tokenizer.from_metadata(characters())
    assert texts_of(ours, "ab ab b a") == ["ab", "\u2581ab", "\u2581", "b\u2581a"]
    assert ours.decode(ours.encode("ab ab b a")) == "ab ab b a"


def test_line_feeds_that_are_a_token_are_one_without_a_merge() -> None:
    ours = Tokenizer.from_metadata(characters())
    assert texts_of(ours, "a\n\nb\n") == ["a", "\n\n", "b", "\n"]
    assert texts_of(ours, "\n\n\n") == ["\n", "\n", "\n"]


def test_characters_without_a_token_are_spelled_in_bytes() -> None:
    ours = Tokenizer.from_metadata(characters())
    assert texts_of(ours, "a\u00e9b") == ["a", "<0xC3>", "<0xA9>", "b"]
    assert ours.decode(ours.encode("a\u00e9b")) == "a\u00e9b"


def test_bytes_without_a_token_are_dropped_from_characters_but_separate() -> None:
    full = characters()
    at = full["tokenizer.ggml.tokens"].index("<0x7A>")
    tokens, kinds = list(full["tokenizer.ggml.tokens"]), list(full["tokenizer.ggml.token_type"])
    del tokens[at], kinds[at]
    assert texts_of(Tokenizer.from_metadata(characters(tokens=tokens, token_type=kinds)), "azb") == ["a", "b"]


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_gemma4_is_known_by_its_pretokenizer_as_well(model: str) -> None:
    """Some converters write another model; its scores, or the byte alphabet, would make other tokens."""
    ours = Tokenizer.from_metadata(characters(model=model, pre="gemma4"))
    assert ours.encode("ab ab\n") == Tokenizer.from_metadata(characters()).encode("ab ab\n")


def test_gemma4_begins_with_bos_whatever_the_file_says() -> None:
    assert Tokenizer.from_metadata(characters(add_bos_token=False)).add_bos
    assert not Tokenizer.from_metadata(characters(bos_token_id=None)).add_bos


def test_a_tag_of_html_ends_nothing_in_gemma4() -> None:
    ours = Tokenizer.from_metadata(characters())
    assert {ours.token_text(id_) for id_ in ours.eog_ids} == {"<eos>", "<|tool_response>"}
    assert "</s>" not in ours.special_tokens
    assert texts_of(ours, "a</s>", special=True) == ["a", "<", "/", "s", ">"]


def test_gemma4_without_merges_is_an_error() -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.ggml\.merges is missing"):
        Tokenizer.from_metadata(characters(merges=None))


def test_each_array_is_read_once() -> None:
    class Once(Sequence[Any]):
        def __init__(self, values: list[Any]) -> None:
            self.values, self.reads = values, 0

        def __len__(self) -> int:
            return len(self.values)

        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("item by item is slow")

        def __iter__(self) -> Iterator[Any]:
            self.reads += 1
            return iter(self.values)

    data = {key: Once(value) if isinstance(value, list) else value for key, value in small().items()}
    ours = Tokenizer.from_metadata(data)
    assert ours.decode(ours.encode("ab<|im_end|>", special=True), special=True) == "ab<|im_end|>"
    assert {value.reads for value in data.values() if isinstance(value, Once)} == {1}


def what_can_survive(ours: Tokenizer, text: str) -> str:
    """The text without what its vocabulary can't say: lone surrogates, bytes that have no token, U+2581 as itself."""
    data = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text).encode()
    if ours.space_prefix or "<0x00>" in vocabulary_of(ours):
        return data.decode().replace("\u2581", " ")
    missing = bytes(byte for byte, character in enumerate(BYTE_ALPHABET) if character not in vocabulary_of(ours))
    return data.translate(None, missing).decode("utf-8", "replace")


@cache
def vocabulary_of(ours: Tokenizer) -> frozenset[str]:
    return frozenset(ours.token_text(id_) for id_ in range(ours.vocab_size))

"""The Python API on tiny models."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_info

import everwarm
from everwarm.errors import EverwarmError, ModelError, RequestError, TemplateError, TokenizerError
from everwarm.llm import End
from tiny import Tiny


@pytest.fixture
def tiny_path(tmp_path: Path, home: Path) -> Path:
    Tiny().write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def llm(tiny_path: Path):
    with everwarm.load(tiny_path) as llm:
        yield llm


def test_events_spell_the_completion(llm: everwarm.LLM) -> None:
    options = {"prompt": "Hello", "max_tokens": 20, "temperature": 1.0, "seed": 3}
    *events, end = llm.stream(**options)
    completion = llm.generate(**options, cache=False)
    assert isinstance(end, End)
    assert end.receipt.tokens_digest
    assert "".join(event.text for event in events) == completion.text
    assert [event.token for event in events] == completion.tokens
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == completion.finish_reason
    assert all(event.logprob <= 0 for event in events)
    assert (completion.prompt_tokens, completion.cached_tokens, completion.tier) == (5, 0, "cold")
    assert completion.ttft_s > 0


def test_greedy_generation_follows_the_logits(llm: everwarm.LLM) -> None:
    tokens = llm.tokenize("Hello")
    for token in llm.generate(tokens=tokens, max_tokens=6, ignore_eos=True).tokens:
        assert token == llm.logits(tokens)[-1].argmax()
        tokens = [*tokens, token]


def test_same_seed_same_text(llm: everwarm.LLM) -> None:
    texts = {llm.generate("Hello", temperature=1.5, seed=1, max_tokens=30).text for _ in range(3)}
    assert len(texts) == 1
    assert llm.generate("Hello", temperature=1.5, seed=2, max_tokens=30).text not in texts


def test_an_end_token_ends_unless_it_is_ignored(llm: everwarm.LLM) -> None:
    forced = {"logit_bias": {258: 1000.0}, "max_tokens": 5}
    completion = llm.generate("Hello", **forced)
    assert (completion.tokens, completion.text, completion.finish_reason) == ([258], "", "stop")
    completion = llm.generate("Hello", ignore_eos=True, **forced)
    assert (completion.tokens, completion.finish_reason) == ([258] * 5, "length")


def test_a_stop_string_ends_and_is_not_emitted(llm: everwarm.LLM) -> None:
    bias = {llm.tokenize("a")[0]: 1000.0}
    completion = llm.generate("Hello", logit_bias=bias, stop=["aaa"], max_tokens=9)
    assert (completion.text, completion.finish_reason, len(completion.tokens)) == ("", "stop", 3)
    completion = llm.generate("Hello", logit_bias=bias, stop="aab", max_tokens=9)
    assert (completion.text, completion.finish_reason) == ("a" * 9, "length")


def test_no_half_character_is_emitted(llm: everwarm.LLM) -> None:
    first, second = llm.tokenize("é")
    *events, _ = llm.stream("Hello", logit_bias={first: 1000.0}, max_tokens=3)
    assert [event.text for event in events[:2]] == ["", "\ufffd"]
    assert "".join(event.text for event in events) == "\ufffd" * 3
    assert llm.detokenize([first, second]) == "é"


def test_generation_stops_where_the_context_is_full(llm: everwarm.LLM) -> None:
    completion = llm.generate("x" * 120, max_tokens=100, ignore_eos=True)
    assert len(completion.tokens) == 8
    assert completion.finish_reason == "length"


def test_messages_go_through_the_template(llm: everwarm.LLM) -> None:
    ids = llm.encode_prompt(messages=[{"role": "user", "content": "Hi <|im_end|>"}])
    spelled = llm.detokenize(ids, special=True)
    assert spelled == "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert ids.count(258) == 1  # the user's look-alike is text


def test_special_tokens_in_a_prompt_only_if_asked_for(llm: everwarm.LLM) -> None:
    assert 258 not in llm.tokenize("a<|im_end|>b")
    assert llm.tokenize("a<|im_end|>b", special=True)[1] == 258
    assert llm.detokenize([258]) == ""
    assert llm.detokenize([258], special=True) == "<|im_end|>"


def test_logits_have_a_row_per_token(llm: everwarm.LLM) -> None:
    logits = llm.logits(np.array([1, 2, 3]))
    assert logits.shape == (3, 260)
    assert logits.dtype == np.float32
    with pytest.raises(RequestError, match="token 260 is not in the vocabulary of 260"):
        llm.logits([260])
    with pytest.raises(RequestError, match="129 tokens, the model's context is 128"):
        llm.logits([1] * 129)
    with pytest.raises(RequestError, match="no tokens"):
        llm.logits([])


def test_two_threads_get_what_each_would_get_alone(tiny_path: Path) -> None:
    for backend in ("native", "reference"):
        with everwarm.load(tiny_path, backend=backend) as llm, ThreadPoolExecutor(4) as threads:
            prompts = [f"Number {i}" for i in range(8)]
            alone = [llm.generate(prompt, max_tokens=12).tokens for prompt in prompts]
            assert [c.tokens for c in threads.map(lambda p: llm.generate(p, max_tokens=12), prompts)] == alone


def test_blas_keeps_its_threads(tiny_path: Path) -> None:
    def threads() -> list[int]:
        return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]

    before = threads()
    with everwarm.load(tiny_path, backend="reference") as llm, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda p: llm.generate(p, max_tokens=5), ["a", "b", "c", "d"] * 3))
    assert threads() == before


def test_damaged_weights_are_told(tmp_path: Path, home: Path) -> None:
    nan = np.full(256, np.nan, np.float32)
    Tiny(drop=("output_norm.weight",), add={"output_norm.weight": nan}).write(tmp_path / "nan.gguf")
    for backend in ("native", "reference"):
        with everwarm.load(tmp_path / "nan.gguf", backend=backend) as llm:
            for use in (lambda: llm.generate("abc"), lambda: llm.score("abc")):
                with pytest.raises(ModelError, match="weights are damaged"):
                    use()


@pytest.mark.parametrize(
    ("head_dim", "kv_type", "advice"),
    [(2, "f16", "use --backend reference"), (48, "q8", "use --kv-type f16 or --backend reference")],
)
def test_heads_that_the_kernels_can_not_take_are_told_before_anything_is_packed(
    tmp_path: Path, home: Path, head_dim: int, kv_type: str, advice: str
) -> None:
    Tiny(head_dim=head_dim).write(tmp_path / "odd.gguf")
    with pytest.raises(ModelError, match=f"heads of {head_dim} elements.* {advice}$"):
        everwarm.load(tmp_path / "odd.gguf", kv_type=kv_type)
    assert not (home / "packs").exists()
    with everwarm.load(tmp_path / "odd.gguf", backend="reference") as llm:
        assert llm.generate("hello", max_tokens=2).tokens


def test_score_is_the_mean_over_windows(llm: everwarm.LLM) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 5
    ids = llm.tokenize(text)
    expected = []
    for low in range(0, len(ids), 100):
        window = ids[low : low + 100]
        logits = llm.logits(window).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        expected += [-logprobs[i, token] for i, token in enumerate(window[1:])]
    score = llm.score(text, window=100)
    assert score.tokens == len(expected)
    assert abs(score.nll - np.mean(expected)) < 1e-4
    assert abs(score.ppl - np.exp(np.mean(expected))) < 1e-1
    with pytest.raises(RequestError, match="at least 2"):
        llm.score("x")
    for window in (0, 1, 129):
        with pytest.raises(RequestError, match=f"window {window}"):
            llm.score(text, window=window)


def test_weights_are_built_once(llm: everwarm.LLM) -> None:
    llm.generate("Hello", max_tokens=1)
    first = llm.weights.stats()
    llm.generate("Hello", max_tokens=3)
    second = llm.weights.stats()
    assert first.misses == second.misses == first.resident == 20
    assert second.hits > first.hits
    assert llm.weights.get("output_norm.weight") is llm.weights.get("output_norm.weight")


def test_preload_leaves_no_miss(llm: everwarm.LLM) -> None:
    told: list[tuple[int, int]] = []
    llm.weights.preload(progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 0
    llm.generate("Hello", max_tokens=2)
    assert llm.weights.stats().misses == 0
    assert llm.weights.stats().hit_rate == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "exactly one of"),
        ({"prompt": "a", "tokens": [1]}, "exactly one of"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"tokens": []}, "the prompt is empty"),
        ({"tokens": [-1]}, "token -1 is not in the vocabulary"),
        ({"prompt": "x" * 128}, "128 tokens, the context is 128"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens 0: must be a whole number of at least 1"),
        ({"prompt": "a", "max_tokens": None}, "max_tokens None: must be a whole number"),
        ({"prompt": "a", "max_tokens": 2.5}, "max_tokens 2.5: must be a whole number"),
        ({"prompt": "a", "temperature": None}, "temperature None: must be a number"),
        ({"prompt": "a", "seed": 1.5}, "seed 1.5: must be a whole number"),
        ({"prompt": "a", "logit_bias": None}, "logit_bias: expected"),
        ({"prompt": "a", "logit_bias": {"5": 1}}, "logit_bias '5'"),
        ({"prompt": "a", "logit_bias": {5: 1e39}}, "logit_bias 5"),
        ({"prompt": "a", "stop": [5]}, "stop: expected a text"),
        ({"prompt": b"a"}, "prompt: expected a text, found bytes"),
        ({"tokens": [1.7]}, "expected a list of whole numbers"),
        ({"prompt": "a", "temperature": -1}, "temperature -1: must be at least 0"),
        ({"prompt": "a", "temprature": 1}, "unknown option.* temprature; known are temperature"),
    ],
)
def test_impossible_requests_say_why(llm: everwarm.LLM, options: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(**options)


def test_a_vocabulary_with_chatml_tokens_needs_no_template(tmp_path: Path, home: Path) -> None:
    Tiny(template=None).write(tmp_path / "tiny.gguf")
    with everwarm.load(tmp_path / "tiny.gguf") as llm:
        ids = llm.encode_prompt(messages=[{"role": "user", "content": "Hi"}])
        assert llm.detokenize(ids, special=True).startswith("<|im_start|>user\nHi<|im_end|>")


def test_messages_that_the_template_refuses(tmp_path: Path, home: Path) -> None:
    Tiny(template="{{ raise_exception('roles must alternate') }}").write(tmp_path / "tiny.gguf")
    with everwarm.load(tmp_path / "tiny.gguf") as llm, pytest.raises(TemplateError, match="roles must alternate"):
        llm.encode_prompt(messages=[{"role": "user", "content": "Hi"}])


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path, home: Path) -> None:
    Tiny(tokens=300).write(tmp_path / "tiny.gguf")
    with pytest.raises(
        ModelError, match="vocabulary mismatch: the tokenizer has 300 tokens, the embedding table 260 rows"
    ):
        everwarm.load(tmp_path / "tiny.gguf")


def test_every_error_is_ours() -> None:
    assert all(issubclass(error, EverwarmError) for error in (ModelError, RequestError, TemplateError, TokenizerError))

"""Every architecture against two independent programs, and against itself.

The golden files (`tests/golden/oracles`) hold tiny models and what transformers and llama.cpp compute on them. Here:
the reference backend is as near as f32 allows, the native one as near as activations of 8 bits allow, and on the native
one nothing changes a bit: chunks, decoding, a batch, a cache, a restart, a small weight budget.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

import everwarm
from everwarm.kernels import _native
from everwarm.kernels.native import NativeStep
from everwarm.model.architectures import ARCHITECTURES
from everwarm.weights.cache.place import largest_layer
from golden.oracles.case import TOKENS, Case
from golden.oracles.cases import CASES
from golden.oracles.quantise import as_q4_1
from kv.test_exact_histories import Talk, seen, words  # noqa: F401  # a fixture
from model.test_exactness import logits, native, together
from model.test_transformer import logits as all_logits
from model.test_transformer import opened

F32_ERROR = 2e-3
"""Of the reference backend, relative to the spread of the logits. Usually 1e-5: both compute in f32."""
MOST_OF_CACHE, MOST_OF_8_BITS = 4.0, 2.0
"""How many times the error of transformers the native backend may have, where transformers rounds as well: keys and
values to f16 (matrices in f32), and in addition the inputs of matrices to 8 bits (packed matrices). Each random model
amplifies that by a factor of its own, which the golden files have. Medians over positions: with experts, a near-tie in
a router may go the other way at a few.
"""
MOST_FLIPPED = 0.1
"""Of positions that are far off, beside twice as many as in transformers: there, experts are others."""
MOST_OTHER_ROUTES = 0.02
"""Of tokens and layers, in which the native backend chooses other experts than transformers."""
CHUNKS = (1, 17, 64)
"""Compared with chunks of 512."""


def test_every_architecture_has_a_case() -> None:
    assert all(any(f"{case.name}-".startswith(f"{name}-") for case in CASES) for name in ARCHITECTURES)


def test_every_case_has_its_files_and_no_file_is_left_over() -> None:
    files = {path for case in CASES for path in (case.gguf, case.golden)}
    assert {path for path in CASES[0].gguf.parent.iterdir() if path.suffix != ".json"} == files


@pytest.mark.parametrize("name", ["llama-experts", "gpt-oss-mxfp4", "deepseek2", "falcon-h1"])
def test_a_packed_case_has_the_same_values(name: str, tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.name == name]
    before = gguf.GGUFReader(path := case.unpack(tmp_path)).tensors
    after = gguf.GGUFReader(as_q4_1(path, tmp_path / "packed.gguf")).tensors
    assert sum(tensor.tensor_type.name == "Q4_1" for tensor in after) > len(after) / 4
    for old, new in zip(before, after, strict=True):
        values, packed = (dequantize(tensor.data, tensor.tensor_type) for tensor in (old, new))
        np.testing.assert_allclose(packed, values, atol=1e-3 * np.abs(values).max(), err_msg=old.name)


class Opened:
    """A case, unpacked, with its golden values."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.path = case.unpack(folder)
        self.packed = as_q4_1(self.path, folder / f"{case.name}-q4_1.gguf")
        self.golden = dict(np.load(case.golden))
        self.tokens: list[int] = self.golden["tokens"].tolist()

    @cached_property
    def reference(self) -> np.ndarray:
        """What the reference backend computes: (tokens, vocab)."""
        return all_logits(opened(self.path, context=self.case.context), self.tokens)

    def errors(self, found: np.ndarray) -> np.ndarray:
        """At each position that was recorded, the greatest difference from transformers, relative to the spread."""
        apart = np.abs(found[:: self.case.step, TOKENS] - self.golden["logits"]).max(-1)
        return np.asarray(apart / self.golden["std"])

    def sum_errors(self, found: np.ndarray) -> np.ndarray:
        """The same of log-sum-exp, which covers all tokens, at more positions."""
        sums = logsumexp(found[:: self.case.fine_step])
        return np.asarray(np.abs(sums - self.golden["logsumexp"]) / self.golden["std"])


@pytest.fixture(params=CASES, ids=lambda case: case.name, scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    return Opened(request.param, tmp_path_factory.mktemp("oracles"))


def logsumexp(rows: np.ndarray) -> np.ndarray:
    wide = rows.astype(np.float64)
    top = wide.max(-1)
    return np.asarray(top + np.log(np.exp(wide - top[:, None]).sum(-1)))


def test_the_reference_backend_computes_what_transformers_does(case: Opened) -> None:
    assert case.errors(case.reference).max() < F32_ERROR
    assert case.sum_errors(case.reference).max() < F32_ERROR


def test_the_reference_backend_chooses_the_token_that_llama_cpp_does(case: Opened) -> None:
    if case.case.no_llama_cpp:
        pytest.skip(case.case.no_llama_cpp)
    unclear = 2 * (F32_ERROR + case.golden["llama_cpp_difference"]) * case.golden["std"]
    clear = case.golden["llama_cpp_margin"] > unclear
    assert clear.mean() > 0.8
    best = case.reference[:: case.case.fine_step].argmax(-1)
    assert (best == case.golden["llama_cpp_best"])[clear].all()


def test_the_native_backend_is_as_near_as_its_cache_allows(case: Opened) -> None:
    if case.case.mxfp4:
        pytest.skip("its experts are packed: activations have 8 bits there")
    errors = case.errors(all_logits(native(case.path, threads=1, context=case.case.context), case.tokens))
    assert np.median(errors) < MOST_OF_CACHE * np.median(case.golden["error_of_f16_cache"]) + F32_ERROR


def test_the_native_backend_is_as_near_as_its_activations_allow(case: Opened) -> None:
    errors = case.errors(all_logits(native(case.packed, threads=1, context=case.case.context), case.tokens))
    expected = case.golden["error_of_8_bits"]
    assert np.median(errors) < MOST_OF_8_BITS * np.median(expected)
    flipped, others = ((found > 4 * np.median(expected)).mean() for found in (errors, expected))
    assert flipped <= 2 * others + MOST_FLIPPED, f"{flipped:.0%} of positions, {others:.0%} in transformers"


def test_few_tokens_take_other_experts_than_in_transformers(case: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of 16 bits move a router's scores a little: a near-tie may go the other way."""
    if "routes" not in case.golden:
        pytest.skip("no experts")
    taken: list[np.ndarray] = []
    known = NativeStep.chosen

    def chosen(step: NativeStep, routed: _native.Routing) -> list[int] | None:
        taken.append(np.sort(np.asarray(routed.chosen).reshape(routed.rows, -1)))
        return known(step, routed)

    monkeypatch.setattr(NativeStep, "recorder", lambda step: None)
    monkeypatch.setattr(NativeStep, "chosen", chosen)
    all_logits(native(case.path, threads=1, context=case.case.context), case.tokens)
    flipped = (np.stack(taken) != np.sort(case.golden["routes"])).any(-1)
    assert flipped.mean() < MOST_OTHER_ROUTES


def test_chunks_of_a_prompt_change_no_bit(case: Opened) -> None:
    tokens = case.tokens[:1100]
    for path in (case.path, case.packed):
        model = native(path)
        expected = logits(model, tokens)
        for chunk in CHUNKS:  # 1: as while decoding
            assert (logits(model, tokens, chunk) == expected).all()


def test_others_in_the_batch_change_no_bit(case: Opened) -> None:
    model = native(case.packed)
    prompts = [case.tokens[:length] for length in (1, 40, 65, 130)]
    alone = [logits(model, prompt) for prompt in prompts]
    for chunk in (1, 19):
        assert all((a == b).all() for a, b in zip(together(model, prompts, chunk), alone, strict=True))


def test_threads_and_instruction_sets_change_no_bit(case: Opened) -> None:
    """More than a block of tokens."""
    tokens = case.tokens[:100]
    for kv_type, isas in (("f16", _native.supported_isas()), ("q8", _native.supported_isas())):
        expected = logits(native(case.packed, threads=1, kv_type=kv_type), tokens)
        for isa in isas:
            assert (logits(native(case.packed, isa=isa, threads=3, kv_type=kv_type), tokens, 33) == expected).all()


@pytest.fixture
def talk(case: Opened, home: Path, seen: list[np.ndarray]) -> Iterator[Talk]:  # noqa: F811
    talk = Talk(case.packed, {}, seen)
    talk.open()
    yield talk
    talk.close()


def test_a_cache_changes_no_bit(talk: Talk) -> None:
    """Each turn is compared with one that looks nothing up and keeps nothing."""
    end = next(iter(talk.llm.tokenizer.eog_ids), 0)
    talk.turn("alice", {"tokens": [*words(1, 99), end, *words(6, 50)]})  # two messages
    known = talk.history("alice")
    assert talk.turn("alice", {"tokens": known + words(2, 20)}).tier == "hot"
    talk.llm.agents.evict("alice")
    assert talk.turn("alice", {"tokens": talk.history("alice") + words(3, 20)}).tier == "warm"
    talk.restart()
    assert talk.turn("alice", {"tokens": talk.history("alice") + words(4, 20)}).tier == "warm"
    talk.llm.agents.fork("alice", "copy")
    middle = [*talk.history("copy")[:113], *words(5, 30)]
    forked = talk.turn("copy", {"tokens": middle})
    assert forked.known_tokens == 113
    index = talk.llm.agents.index
    if index.states is not None:  # the last block before the end of a message
        assert forked.cached_tokens == 64
    elif index.windows is not None:  # the end of a message, or behind it
        assert 100 <= forked.cached_tokens <= 113
    else:
        assert forked.cached_tokens == 113


def test_a_weight_budget_of_a_quarter_changes_no_bit(case: Opened, home: Path) -> None:
    prompt = case.tokens[:80]
    options = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True, "cache": False}
    with everwarm.load(case.packed, threads=1) as whole:
        expected = whole.logits(prompt).view(np.uint32)
        said = whole.generate(tokens=prompt, **options).tokens
        least = largest_layer(whole.weights._sizes)
        budget = max(whole.weights.total_bytes // 4, least)  # with experts, a layer of a tiny model is more than that
    with everwarm.load(case.packed, threads=1, weight_budget=budget) as quarter:
        assert not quarter.weights.mapped
        assert quarter.generate(tokens=prompt, **options).tokens == said
        assert (quarter.logits(prompt).view(np.uint32) == expected).all()

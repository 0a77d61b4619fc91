"""The operations of a pass are recorded once: what they use is counted, and let go of, as if they were asked for."""

import gc
import weakref
from pathlib import Path

import pytest

import everwarm
from tiny import Tiny

NAME = "blk.1.ffn_up.weight"


@pytest.fixture
def llm(tmp_path: Path) -> everwarm.LLM:
    Tiny().write(tmp_path / "tiny.gguf")
    return everwarm.load(tmp_path / "tiny.gguf", backend="native")


def test_every_pass_counts_as_a_use_of_each_tensor(llm: everwarm.LLM) -> None:
    with llm:
        llm.weights.preload()
        before = llm.weights.stats().hits
        llm.generate("abc", max_tokens=1, ignore_eos=True, cache=False)
        once = llm.weights.stats().hits - before
        llm.generate("abc", max_tokens=5, ignore_eos=True, cache=False)
        assert llm.weights.stats().hits - before == 6 * once
        assert once >= 9 * len(llm.config.layers)
        assert llm.weights.stats().misses == 0


def test_a_tensor_that_is_evicted_is_let_go_of_and_missed(llm: everwarm.LLM) -> None:
    with llm:
        expected = llm.generate("abc", max_tokens=5, ignore_eos=True, cache=False).tokens
        alive = weakref.ref(llm.weights.get("blk.1.ffn_norm.weight"))
        misses = llm.weights.stats().misses
        llm.weights.evict(["blk.1.ffn_norm.weight", NAME])
        gc.collect()
        assert alive() is None
        assert llm.generate("abc", max_tokens=5, ignore_eos=True, cache=False).tokens == expected
        assert llm.weights.stats().misses == misses + 2


def test_another_tensor_in_its_place_is_the_one_that_is_used(llm: everwarm.LLM) -> None:
    with llm:
        expected = llm.generate("abc", max_tokens=5, ignore_eos=True, cache=False).tokens
        llm.weights._ready[NAME] = llm.weights._ready["blk.0.ffn_gate.weight"]
        changed = llm.score("abc and more").nll
        del llm.weights._ready[NAME]
        assert llm.score("abc and more").nll != changed
        assert llm.generate("abc", max_tokens=5, ignore_eos=True, cache=False).tokens == expected


def test_a_budget_below_the_model_records_nothing(llm: everwarm.LLM) -> None:
    with llm:
        expected = llm.generate("abc", max_tokens=5, ignore_eos=True, cache=False).tokens
        llm.weights.resize(llm.weights.total_bytes - 1)
        assert llm.generate("abc", max_tokens=5, ignore_eos=True, cache=False).tokens == expected
        assert llm.model._program is None

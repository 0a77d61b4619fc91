"""Real models against transformers (f32) and llama.cpp, from golden files made by `golden/make_logits.py`."""

import math
from pathlib import Path

import numpy as np
import pytest

import everwarm
from everwarm.engine.sampler import log_softmax
from golden.texts import PROSE, PROSE_TOKENS, SCORE_WINDOW, TEXTS
from short_and_long import short_and_long

pytestmark = [pytest.mark.model, pytest.mark.slow]

GOLDEN = Path(__file__).parent.parent / "golden"
MAX_LOGIT_DIFFERENCE = 1e-3
MAX_PERPLEXITY_RATIO = 1.006
MIN_TOP1_AGREEMENT = 0.95


class Case:
    def __init__(self, path: Path, golden: str) -> None:
        self.llm = everwarm.load(path, backend="reference")
        self.golden = np.load(GOLDEN / golden)
        self._computed: dict[tuple[int, ...], np.ndarray] = {}

    def logits(self, ids: list[int]) -> np.ndarray:
        """Those of the golden texts are computed once, since several tests look at them. A whole window is large."""
        if len(ids) > PROSE_TOKENS:
            return self.llm.logits(ids)
        known = tuple(ids)
        if known not in self._computed:
            self._computed[known] = self.llm.logits(ids)
        return self._computed[known]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Case:
    return Case(smollm2_path, "logits-smollm2.npz")


@pytest.fixture(scope="module")
def qwen(qwen_path: Path) -> Case:
    return Case(qwen_path, "logits-qwen2.5-coder.npz")


@pytest.fixture(params=["smollm2", "qwen"])
def case(request: pytest.FixtureRequest) -> Case:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_llama_cpps(case: Case, text: str) -> None:
    ids = case.llm.tokenize(TEXTS[text], special=text == "chat")[: PROSE_TOKENS if text == "prose" else None]
    assert ids == case.golden[f"{text}_ids"].tolist()


@pytest.mark.parametrize("text", TEXTS)
def test_logits_equal_those_of_transformers(case: Case, text: str) -> None:
    logits = case.logits(case.golden[f"{text}_ids"].tolist())
    top = np.take_along_axis(logits, case.golden[f"{text}_top_ids"], axis=-1)
    assert np.abs(top - case.golden[f"{text}_top_logits"]).max() <= MAX_LOGIT_DIFFERENCE
    logsumexp = (logits - log_softmax(logits))[:, 0]  # covers what is not among the top
    assert np.abs(logsumexp - case.golden[f"{text}_logsumexp"]).max() <= MAX_LOGIT_DIFFERENCE


def test_last_row_equals_that_of_transformers(case: Case) -> None:
    logits = case.logits(case.golden["chat_ids"].tolist())
    assert np.abs(logits[-1] - case.golden["chat_last_row"]).max() <= MAX_LOGIT_DIFFERENCE


@short_and_long("most", PROSE_TOKENS, 7 * SCORE_WINDOW)  # a half of the first window; all of it
def test_perplexity_and_best_tokens_agree_with_llama_cpp(case: Case, most: int) -> None:
    tokens = case.llm.tokenize(PROSE)
    assert len(tokens) >= 5 * SCORE_WINDOW
    tokens = tokens[:most]
    best, nll = [], []
    for low in range(0, len(tokens), SCORE_WINDOW):
        window = tokens[low : low + SCORE_WINDOW]
        logits = case.logits(window)
        best.append(logits.argmax(-1))
        for at in range(0, len(window) - 1, 256):
            targets = np.asarray(window[at + 1 : at + 257])
            logprobs = log_softmax(logits[at : at + len(targets)])
            nll.append(-logprobs[np.arange(len(targets)), targets])
    ours = np.concatenate(nll)
    ratio = math.exp(ours.mean() - case.golden["llama_nll"][: len(ours)].mean(dtype=np.float64))
    agreement = (np.concatenate(best) == case.golden["llama_best"][: len(tokens)]).mean()
    print(f"\n{len(tokens)} tokens: perplexity {ratio:.5f} x llama.cpp's, top-1 agreement {agreement:.4f}")
    assert 1 / MAX_PERPLEXITY_RATIO <= ratio <= MAX_PERPLEXITY_RATIO
    assert agreement >= MIN_TOP1_AGREEMENT

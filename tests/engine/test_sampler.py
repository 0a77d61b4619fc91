"""The sampler against definitions written out, and its promise: same seed, same choice, whatever else is going on."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.engine.processors import packed
from everwarm.engine.sampler import Sampler, keep, log_softmax, uniform
from everwarm.engine.sampling import Sampling
from everwarm.errors import RequestError
from everwarm.kernels.native import NativeRows
from everwarm.kernels.reference import ReferenceRows

ROWS = NativeRows()
LOGITS = np.array([1.0, 3.0, 2.0, -1.0, 3.0, 0.5], np.float32)


def draw(count: int, logits: np.ndarray = LOGITS, **sampling: object) -> list[int]:
    """First choices of `count` seeds."""
    return [
        Sampler(Sampling(seed=seed, **sampling), [], len(logits), ROWS).sample(logits).token  # type: ignore[arg-type]
        for seed in range(count)
    ]


def test_greedy_takes_the_most_likely_and_of_equals_the_first() -> None:
    assert Sampler(Sampling(), [], 6, ROWS).sample(LOGITS).token == 1


def test_temperature_one_draws_from_the_models_distribution() -> None:
    found = Counter(draw(20000, temperature=1.0))
    expected = np.exp(log_softmax(LOGITS))
    np.testing.assert_allclose([found[i] / 20000 for i in range(6)], expected, atol=0.015)


def test_a_tiny_temperature_is_nearly_greedy_and_never_overflows() -> None:
    assert set(draw(50, temperature=1e-30)) <= {1, 4}


def test_top_k_keeps_exactly_k() -> None:
    assert set(draw(500, temperature=5.0, top_k=3)) == {1, 4, 2}
    assert set(draw(50, temperature=5.0, top_k=1)) == {1}  # of two equal ones, the smaller id
    assert set(draw(2000, temperature=5.0, top_k=100)) == set(range(6))


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    # 0.384, 0.384, 0.141, ...: two reach 0.7, three reach 0.8
    assert set(draw(500, temperature=1.0, top_p=0.7)) == {1, 4}
    assert set(draw(500, temperature=1.0, top_p=0.8)) == {1, 4, 2}
    assert set(draw(50, temperature=1.0, top_p=1e-9)) == {1}


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    assert set(draw(500, temperature=1.0, top_k=3, top_p=0.83)) == {1, 4}


def test_min_p_is_relative_to_the_best() -> None:
    assert set(draw(500, temperature=1.0, min_p=0.3)) == {1, 4, 2}
    assert set(draw(500, temperature=1.0, min_p=0.5)) == {1, 4}


def test_top_p_over_a_flat_distribution_of_many_tokens() -> None:
    flat = np.zeros(5000, np.float32)
    assert max(draw(300, flat, temperature=1.0, top_p=0.5)) < 2500
    assert max(draw(300, flat, temperature=1.0, top_p=0.999)) > 2500


@given(st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=400), st.floats(0.05, 0.999))
def test_top_p_equals_its_definition(values: list[float], top_p: float) -> None:
    ids, _ = keep(np.asarray(values, np.float32), Sampling(temperature=1.0, top_p=top_p), ROWS)
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))
    logits = np.asarray(values, np.float64) - max(values)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    assert ids.tolist() == order[: len(ids)]
    assert probabilities[ids].sum() >= top_p - 1e-5
    assert probabilities[ids[:-1]].sum() < top_p + 1e-5


def test_repetition_penalty_counts_prompt_and_answer_presence_the_answer_only() -> None:
    logits = np.array([2.0, 1.9, -1.0, -1.1], np.float32)
    sampler = Sampler(Sampling(repetition_penalty=2.0), [0], 4, ROWS)
    assert [sampler.sample(logits).token for _ in range(2)] == [1, 0]  # 0 was in the prompt; then both are halved
    negative = Sampler(Sampling(repetition_penalty=2.0), [2, 0, 1], 4, ROWS)
    assert negative.sample(np.array([-9, -9, -1.0, -1.1], np.float32)).token == 3  # a negative logit gets more negative
    presence = Sampler(Sampling(presence_penalty=0.5), [0], 4, ROWS)
    assert [presence.sample(logits).token for _ in range(4)] == [0, 1, 0, 0]
    frequency = Sampler(Sampling(frequency_penalty=0.5), [0], 4, ROWS)
    assert [frequency.sample(logits).token for _ in range(4)] == [0, 1, 0, 1]


def test_logit_bias_forbids_and_forces() -> None:
    assert Sampler(Sampling(logit_bias={1: float("-inf")}), [], 6, ROWS).sample(LOGITS).token == 4
    assert Sampler(Sampling(logit_bias={3: 100.0}), [], 6, ROWS).sample(LOGITS).token == 3
    with pytest.raises(RequestError, match="token 6 is not in the vocabulary of 6"):
        Sampler(Sampling(logit_bias={6: 1.0}), [], 6, ROWS)
    with pytest.raises(RequestError, match="every token"):
        Sampler(Sampling(logit_bias=dict.fromkeys(range(6), float("-inf"))), [], 6, ROWS).sample(LOGITS)


def test_log_probabilities_are_the_models_own() -> None:
    choice = Sampler(Sampling(temperature=2.0, top_k=1, logit_bias={3: 100.0}, top_logprobs=2), [], 6, ROWS).sample(
        LOGITS
    )
    expected = log_softmax(LOGITS)
    assert choice.token == 3
    assert choice.logprob == pytest.approx(expected[3], abs=1e-5)
    assert [token for token, _ in choice.top_logprobs] == [1, 4]
    np.testing.assert_allclose(np.exp(expected).sum(), 1)


def test_same_seed_same_choices() -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((50, 100)).astype(np.float32)

    def run(seed: int | None) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), [], 100, ROWS)
        return [sampler.sample(row).token for row in rows]

    assert run(7) == run(7)
    assert run(7) != run(8)
    assert run(None) != run(None)


def test_draws_are_uniform_and_will_not_change() -> None:
    values = np.array([uniform(seed, index) for seed in range(100) for index in range(100)])
    assert 0 <= values.min() < values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01
    assert abs(values.var() - 1 / 12) < 0.005
    assert [uniform(0, 0), uniform(2**64 - 1, 5)] == PINNED


PINNED = [0.5744863976557276, 0.3184875416932659]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 10**400),
        ("top_k", 10**400),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("nan")),
        ("seed", -1),
        ("seed", 2**64),
        ("top_logprobs", -1),
        ("logit_bias", {0: float("nan")}),
        ("logit_bias", {0: -(10**400)}),
    ],
)
def test_impossible_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field):
        Sampling(**{field: value})  # type: ignore[arg-type]


class Allowing:
    """A constraint out of a function of the tokens so far."""

    def __init__(self, allowed: Callable[[list[int]], np.ndarray | None]) -> None:
        self._allowed = allowed
        self.said: list[int] = []

    def mask(self) -> np.ndarray | None:
        allowed = self._allowed(self.said)
        return None if allowed is None else packed(allowed)

    def advance(self, token: int) -> None:
        self.said.append(token)

    def rollback(self, count: int) -> None:
        del self.said[len(self.said) - count :]


def test_a_constraint_sees_the_answer_so_far_and_says_what_may_follow() -> None:
    seen: list[list[int]] = []

    def allowed(said: list[int]) -> np.ndarray | None:
        seen.append(list(said))
        return None if len(said) == 1 else np.arange(6) >= 4 - len(said)

    for options in ({}, {"temperature": 2.0}, {"temperature": 2.0, "top_k": 2}, {"logit_bias": {0: 100.0}}):
        seen.clear()
        sampler = Sampler(Sampling(seed=3, **options), [], 6, ROWS, Allowing(allowed))  # type: ignore[arg-type]
        said = [sampler.sample(LOGITS).token for _ in range(3)]
        assert seen == [[], said[:1], said[:2]]
        assert said[0] >= 4
        assert said[2] >= 2
    third = Allowing(lambda said: np.arange(6) == 3)
    plain, constrained = Sampler(Sampling(), [], 6, ROWS), Sampler(Sampling(), [], 6, ROWS, third)
    assert constrained.sample(LOGITS).logprob == pytest.approx(log_softmax(LOGITS)[3])  # the model's own
    assert plain.sample(LOGITS).token == 1
    with pytest.raises(RequestError, match="every token"):
        Sampler(Sampling(), [], 6, ROWS, Allowing(lambda said: np.zeros(6, bool))).sample(LOGITS)


def test_tokens_that_are_taken_back_leave_no_trace() -> None:
    options = Sampling(
        seed=3,
        temperature=1.5,
        repetition_penalty=1.3,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={2: 1.0},
    )
    rows = np.random.default_rng(0).standard_normal((12, 50)).astype(np.float32)

    def new() -> Sampler:
        return Sampler(options, [1, 2, 3], 50, ROWS, Allowing(lambda said: np.arange(50) >= len(said)))

    plain, changed = new(), new()
    expected = [plain.sample(row) for row in rows]
    found = []
    for number, row in enumerate(rows):
        for _ in range(number % 4):
            changed.sample(-row)
        changed.rollback(number % 4)
        found.append(changed.sample(row))
    assert found == expected


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_operations_on_rows_agree_between_backends(temperature: float) -> None:
    reference = ReferenceRows()
    for row in np.random.default_rng(1).standard_normal((20, 300)).astype(np.float32) * 4:
        assert reference.summarize(row, temperature)[:2] == ROWS.summarize(row, temperature)[:2]
        assert reference.summarize(row, temperature)[2] == pytest.approx(ROWS.summarize(row, temperature)[2], rel=1e-5)
        assert reference.greatest_ids(row, 7) == ROWS.greatest_ids(row, 7)
        fractions = np.linspace(0.01, 0.99, 20)
        drawn = [reference.draw(row, temperature, fraction) for fraction in fractions]
        assert sum(a != ROWS.draw(row, temperature, f) for a, f in zip(drawn, fractions, strict=True)) <= 1
    for bad in (np.nan, np.inf):
        assert np.isnan(reference.summarize(np.array([1, bad, 2], np.float32), 1.0)[2])
    equal = np.array([2.0, 5.0, 5.0, 1.0, 5.0], np.float32)
    assert reference.greatest_ids(equal, 4) == ROWS.greatest_ids(equal, 4) == [1, 2, 4, 0]

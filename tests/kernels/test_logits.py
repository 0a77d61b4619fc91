"""What sampling asks of a row of logits, against NumPy; all instruction sets say the same."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from everwarm.engine.processors import packed
from everwarm.kernels import _native
from everwarm.kernels.reference import ReferenceRows

ISAS = _native.supported_isas()
ROWS = hnp.arrays(np.float32, st.integers(1, 300), elements=st.floats(-50, 50, width=32))


@given(ROWS, st.floats(0.1, 10))
def test_summary_of_a_row(row: np.ndarray, temperature: float) -> None:
    best, greatest, total = _native.summarize(row, temperature)
    assert (best, greatest) == (int(row.argmax()), row.max())
    np.testing.assert_allclose(total, np.exp((row.astype(np.float64) - row.max()) / temperature).sum(), rtol=1e-4)
    assert {_native.summarize(row, temperature, isa) for isa in ISAS} == {(best, greatest, total)}


@given(ROWS, st.integers(0, 300))
def test_greatest_ids_are_in_order_and_ties_go_to_the_smaller(row: np.ndarray, count: int) -> None:
    row = np.round(row)  # many equal values
    count = min(count, len(row))
    expected = sorted(range(len(row)), key=lambda i: (-row[i], i))[:count]
    for isa in ISAS:
        assert _native.greatest_ids(row, count, isa) == expected


@given(ROWS, st.floats(0.1, 10), st.floats(0, 1, exclude_max=True))
def test_a_draw_is_where_the_cumulative_sum_passes_the_fraction(
    row: np.ndarray, temperature: float, fraction: float
) -> None:
    drawn = _native.draw(row, temperature, fraction)
    weights = np.exp((row.astype(np.float64) - row.max()) / temperature)
    share = np.cumsum(weights) / weights.sum()
    assert share[drawn] >= fraction - 1e-5
    assert drawn == 0 or share[drawn - 1] <= fraction + 1e-5
    assert {_native.draw(row, temperature, fraction, isa) for isa in ISAS} == {drawn}


@given(ROWS, st.randoms(use_true_random=False), st.sampled_from([0.0, 0.01, 0.5, 1.0]))
def test_what_no_bit_allows_is_forbidden(row: np.ndarray, random: Random, share: float) -> None:
    allowed = np.array([random.random() < share for _ in row], np.bool_)
    bits = packed(allowed)
    expected = np.where(allowed, row, np.float32(-np.inf))
    for isa in ISAS:
        found = row.copy()
        assert _native.forbid(found, bits, isa) == allowed.sum()
        assert found.tobytes() == expected.tobytes()
    found = row.copy()
    assert ReferenceRows().forbid(found, bits) == allowed.sum()
    assert found.tobytes() == expected.tobytes()


def test_bits_behind_the_vocabulary_mean_nothing() -> None:
    row = np.ones(33, np.float32)
    assert _native.forbid(row, np.array([0, 2**32 - 1, 2**32 - 1], np.uint32)) == 1
    assert np.flatnonzero(np.isfinite(row)).tolist() == [32]


def test_a_draw_never_takes_what_is_forbidden() -> None:
    row = np.full(40, -np.inf, np.float32)
    row[[3, 20]] = 1.0
    assert [_native.draw(row, 1.0, fraction) for fraction in (0.0, 0.49, 0.51, np.nextafter(1, 0))] == [3, 3, 20, 20]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("at", [0, 5, 63, 64, 99])
def test_what_is_no_number_is_seen_wherever_it_is(isa: str, at: int) -> None:
    row = np.linspace(-3, 3, 100, dtype=np.float32)
    for value, seen in ((np.nan, True), (np.inf, True), (-np.inf, False)):
        row[at] = value
        assert np.isnan(_native.summarize(row, 1.0, isa)[2]) == seen
    row[at] = np.nan
    assert at not in _native.greatest_ids(row, 100, isa)


def test_bad_arguments_are_refused() -> None:
    row = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="temperature"):
        _native.summarize(row, 0.0)
    with pytest.raises(ValueError, match="a row of 0"):
        _native.summarize(np.empty(0, np.float32), 1.0)
    for count in (-1, 5):
        with pytest.raises(ValueError, match="greatest_ids"):
            _native.greatest_ids(row, count)
    for words in (0, 3):  # 97 logits take 4 words
        with pytest.raises(ValueError, match="forbid"):
            _native.forbid(np.zeros(97, np.float32), np.zeros(words, np.uint32))
    with pytest.raises(TypeError):
        _native.forbid(row, np.zeros(1, np.uint8))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        _native.summarize(np.zeros(4), 1.0)  # type: ignore[arg-type]

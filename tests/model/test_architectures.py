"""Every architecture against transformers' own class with the same weights (`golden/make_architectures.py`)."""

from pathlib import Path

import numpy as np
import pytest

from everwarm.kernels import _native
from everwarm.kernels.native import NativeBackend
from everwarm.model.architectures import ARCHITECTURES
from golden.architectures import GOLDEN, TINY, TOKENS
from model.test_transformer import logits, opened

F32_ERROR = 2e-5
"""Of the reference backend, relative to the spread of the logits: both compute in f32, in another order."""
NATIVE_ERROR = 2e-2
"""Of the native backend, whose activations have 8 bits."""


def test_every_architecture_has_a_golden_file() -> None:
    assert TINY.keys() == ARCHITECTURES.keys()


@pytest.fixture(params=TINY, scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    TINY[request.param].write(path)
    return path, np.load(GOLDEN)[request.param]


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / expected.std())


def test_the_reference_backend_computes_what_transformers_does(case: tuple[Path, np.ndarray]) -> None:
    path, expected = case
    assert error(logits(opened(path), TOKENS), expected) < F32_ERROR


@pytest.mark.parametrize("isa", _native.supported_isas())
def test_the_native_backend_is_as_near_as_its_activations_allow(case: tuple[Path, np.ndarray], isa: str) -> None:
    path, expected = case
    found = logits(opened(path, NativeBackend(isa, 1, "f16")), TOKENS)
    assert error(found, expected) < NATIVE_ERROR

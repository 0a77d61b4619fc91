"""What every refusal has in common: a `GGUFError` of one line, path first, next step last, in little memory."""

import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest

from everwarm.errors import GGUFError
from everwarm.weights.gguf.file import GGUFFile

MAX_MEMORY_BYTES = 4 << 20


def assert_refused(path: Path, named: Path, words: Sequence[str]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(GGUFError) as caught:
            GGUFFile(path)
        assert tracemalloc.get_traced_memory()[1] < MAX_MEMORY_BYTES
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith(f"{named}: ")
    assert message.isprintable()
    assert "; " in message, "no next step"
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"

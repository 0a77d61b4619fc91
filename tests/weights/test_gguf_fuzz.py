"""Files damaged at random: whatever the damage, opening and reading everything ends in a result or a `GGUFError`.

Each case also keeps its memory: a few hundred bytes of file never cost megabytes.
"""

import random
import struct
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from handmade_gguf import gguf, small_model, string
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everwarm.errors import GGUFError
from everwarm.weights.gguf.file import GGUFFile
from everwarm.weights.gguf.strings import string_starts

SEEDS = range(8)
MUTATIONS_PER_SEED = 500
MAX_MEMORY_BYTES = 2 << 20
TELLING_NUMBERS = [0, 1, 2, 7, 8, 9, 12, 13, 255, 256, 1 << 16, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1]

MODEL = small_model()


@pytest.fixture(scope="module", autouse=True)
def traced_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def survives(path: Path, content: bytes) -> bool:
    """Open, read everything, close. True if the file was found sound, False if refused; anything else is a failure."""
    path.write_bytes(content)
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        with GGUFFile(path) as file:
            for value in file.metadata.values():
                read(value)
            for name, info in file.tensors.items():
                assert file.data(name).size == info.size_bytes
                file.data(name).sum()
        refusal = None
    except GGUFError as error:
        refusal = str(error)
    assert tracemalloc.get_traced_memory()[1] - before < MAX_MEMORY_BYTES
    assert refusal is None or (refusal.startswith(f"{path}: ") and refusal.isprintable())
    return refusal is None


def read(value: object) -> None:
    if isinstance(value, Sequence) and not isinstance(value, str):
        assert len(list(value)) == len(value)
        for item in value:
            read(item)


def damage(content: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at = rng.randrange(len(damaged))
        match rng.randrange(7):
            case 0:
                damaged[at] ^= 1 << rng.randrange(8)
            case 1:
                damaged[at] = rng.randrange(256)
            case 2:
                damaged[at : at + 8] = struct.pack("<Q", rng.choice(TELLING_NUMBERS))
            case 3:
                damaged[at : at + 4] = struct.pack("<I", rng.choice(TELLING_NUMBERS) & 0xFFFFFFFF)
            case 4:
                del damaged[at : at + rng.randrange(1, 20)]
            case 5:
                damaged[at:at] = rng.randbytes(rng.randrange(1, 20))
            case 6:
                other = rng.randrange(len(damaged))
                damaged[at : at + 16] = damaged[other : other + 16]
        damaged = damaged or bytearray(b"GGUF")
    return bytes(damaged)


def test_the_undamaged_file_is_sound(tmp_path: Path) -> None:
    assert survives(tmp_path / "m.gguf", MODEL)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_damage(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    sound = sum(survives(tmp_path / "m.gguf", damage(MODEL, rng)) for _ in range(MUTATIONS_PER_SEED))
    assert 0 < sound < MUTATIONS_PER_SEED, "damage that never or always matters tests nothing"


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    for length in range(len(MODEL)):
        assert not survives(tmp_path / "m.gguf", MODEL[:length]), f"{length} of {len(MODEL)} bytes"


def test_every_byte_inverted(tmp_path: Path) -> None:
    for at in range(len(MODEL)):
        survives(tmp_path / "m.gguf", MODEL[:at] + bytes([MODEL[at] ^ 0xFF]) + MODEL[at + 1 :])


def test_damaged_vocabularies_are_walked_as_one_by_one() -> None:
    rng = random.Random(0)
    sound = b"".join(string(rng.randbytes(rng.randrange(1, 20))) for _ in range(6_000))
    for _ in range(50):
        data = np.frombuffer(damage(sound, rng), np.uint8)
        runs = list(string_starts(data, 6_000))
        assert [start for starts, _ in runs for start in starts.tolist()] == starts_one_by_one(data.tobytes(), 6_000)


def starts_one_by_one(data: bytes, count: int) -> list[int]:
    starts: list[int] = []
    position = 0
    while len(starts) < count and position + 8 <= len(data):
        end = position + 8 + int.from_bytes(data[position : position + 8], "little")
        if end > len(data):
            break
        starts.append(position)
        position = end
    return starts


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.integers(0, 3), st.integers(0, 3))
def test_arbitrary_bytes_after_a_sound_start(tmp_path: Path, rest: bytes, pairs: int, tensors: int) -> None:
    survives(tmp_path / "m.gguf", gguf(pair_count=pairs, tensor_count=tensors) + rest)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, len(MODEL) - 1), st.binary(min_size=1, max_size=12))
def test_arbitrary_bytes_anywhere(tmp_path: Path, at: int, patch: bytes) -> None:
    survives(tmp_path / "m.gguf", MODEL[:at] + patch + MODEL[at + len(patch) :])

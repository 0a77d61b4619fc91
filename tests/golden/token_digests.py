"""The golden files `tests/golden/tokens/*.json.xz`: what llama.cpp made of every nasty string, as digests.

A digest names the string that has changed, which is enough: llama.cpp can be asked for its ids (`make_tokens.py`).
"""

import hashlib
import json
import lzma
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from text.nasty import nasty_strings

FOLDER = Path(__file__).parent / "tokens"
DEVIATIONS = Path(__file__).parent / "token_deviations.json"
DIGEST_BYTES = 3


@dataclass(frozen=True, slots=True)
class Golden:
    """A vocabulary and llama.cpp's answers to it."""

    family: str
    metadata: dict[str, Any]
    """Of the reduced vocabulary; empty if the full one is meant."""
    facts: dict[str, Any]
    """`bos_id`, `eos_id`, `eog_ids`, `add_bos`, `add_eos`, and digests of the bytes of all tokens."""
    digests: dict[str, list[str]]
    """Of the ids of each nasty string, by mode: `plain` or `special`."""


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def digests(all_ids: Iterable[list[int]]) -> list[str]:
    return [digest(array("I", ids).tobytes()) for ids in all_ids]


def write(golden: Golden) -> None:
    data = {
        "strings": _corpus(),
        "metadata": golden.metadata,
        "facts": golden.facts,
        "digests": {mode: "".join(values) for mode, values in golden.digests.items()},
    }
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{golden.family}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


@cache
def read(family: str) -> Golden:
    data = json.loads(lzma.decompress((FOLDER / f"{family}.json.xz").read_bytes()))
    assert data["strings"] == _corpus(), "the nasty strings have changed: run tests/golden/make_tokens.py again"
    step = 2 * DIGEST_BYTES
    cut = {mode: [text[at : at + step] for at in range(0, len(text), step)] for mode, text in data["digests"].items()}
    return Golden(family, data["metadata"], data["facts"], cut)


def families() -> list[str]:
    """Those with a vocabulary of their own."""
    names = sorted(path.name.removesuffix(".json.xz") for path in FOLDER.iterdir())
    return [name for name in names if read(name).metadata]


@cache
def deviations(family: str, mode: str) -> dict[str, str]:
    """Strings on which we differ from llama.cpp on purpose, and why."""
    known = json.loads(DEVIATIONS.read_text(encoding="utf-8"))
    found: dict[str, str] = known.get(family, {}).get(mode, {})
    return found


def _corpus() -> str:
    return hashlib.blake2b("\0\0".join(nasty_strings()).encode(), digest_size=8).hexdigest()

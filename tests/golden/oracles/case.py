"""What a golden case is: a tiny model of one architecture, and where its files are.

The model is described as a class of transformers with the fields of its config. `make.py` writes two files for it: the
model as GGUF, compressed, and an archive with what two independent programs compute on it. See README.md.
"""

import lzma
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
VOCAB = 260
"""The vocabulary of `tests/tiny.py`: 256 bytes, three control tokens, one merge."""
STEP = 4
"""Logits are kept at every fourth position, and of every fifth token; of the rest, the log-sum-exp."""
TOKENS = slice(0, VOCAB, 5)


@dataclass(frozen=True)
class Case:
    """One tiny model. `config` is what differs from `SHAPE` and from the class's defaults; `...` is the default."""

    name: str  # the architecture in GGUF, with a variant after a dash
    model: str  # the class in transformers
    config: Mapping[str, Any] = field(default_factory=dict)
    weights: Mapping[str, tuple[float, ...] | float] = field(default_factory=dict)
    """By a pattern of the tensor's name: the four levels of its values, or a factor on the usual spread."""
    norms_add_one: bool = False  # the class multiplies by 1 + weight, as Gemma's does
    length: int = 150
    step: int = STEP
    seed: int = 0
    mistakes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Changes to the config with which the logits must be clearly different: else the case would not show them."""
    experts: bool = False
    mxfp4: bool = False  # the experts are in MXFP4
    mtp: tuple[str, str, tuple[str, str, str, str]] | None = None
    """Names in a block that predicts a second token: its layer, what is around it, and there the projection and three
    norms. transformers leaves it out; a file may have it.
    """
    saved: Mapping[str, Any] = field(default_factory=dict)
    """What llama.cpp's converter must find in config.json; `...` takes a field away."""
    norm_groups: int = 1
    """Of the gated norm of Mamba 2: transformers norms the whole width, llama.cpp and the original each group."""
    no_llama_cpp: str = ""  # why the logits of llama.cpp are not recorded
    context: int | None = None  # the context that the model has to be opened with, if not the one in the file

    @property
    def architecture(self) -> str:
        """In GGUF."""
        with_dash = [name for name in ("gpt-oss", "falcon-h1") if self.name.startswith(name)]
        return with_dash[0] if with_dash else self.name.partition("-")[0]

    @property
    def fine_step(self) -> int:
        """What takes one number for a position is kept at more of them."""
        return self.step // STEP

    @property
    def gguf(self) -> Path:
        return FOLDER / "data" / f"{self.name}.gguf.xz"

    @property
    def golden(self) -> Path:
        return FOLDER / "data" / f"{self.name}.npz"

    def unpack(self, folder: Path) -> Path:
        path = folder / f"{self.name}.gguf"
        path.write_bytes(lzma.decompress(self.gguf.read_bytes()))
        return path

    def tokens(self) -> list[int]:
        drawn: list[int] = np.random.default_rng(self.length).integers(0, 256, self.length).tolist()
        return drawn


SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}

"""A process that loads a model, and packs it if nobody has done so yet. A module of its own: it imports little."""

import multiprocessing
import os
from pathlib import Path

import everwarm


def load(
    model: Path,
    prompt: list[int],
    environment: dict[str, str],
    gate: "multiprocessing.synchronize.Barrier",
    results: "multiprocessing.Queue[bytes]",
) -> None:
    """Wait for the others, load, and tell the logits."""
    os.environ.clear()
    os.environ.update(environment)
    gate.wait()
    with everwarm.load(model) as llm:
        results.put(llm.logits(prompt).tobytes())

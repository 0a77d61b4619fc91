"""everwarm: a local LLM runtime for GGUF models that never computes the same thing twice.

import everwarm

with everwarm.load("smollm2") as llm:
    for event in llm.stream(messages=[{"role": "user", "content": "Hello"}]):
        print(event.text, end="")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everwarm.llm import LLM, Completion, Event, load

__all__ = ["LLM", "Completion", "Event", "load"]


def __getattr__(name: str) -> Any:
    # The facade pulls in NumPy and the tokenizer: not before someone needs it, so that `everwarm --help` is quick.
    if name in __all__:
        from everwarm import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'everwarm' has no attribute {name!r}")

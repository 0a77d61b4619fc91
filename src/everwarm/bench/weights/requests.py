"""The requests that rows of the benchmark measure, and whose accesses are recorded: the same in every row.

This imports nothing that is large: what a row imports counts as its memory.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everwarm.generation.completion import Completion
    from everwarm.llm import LLM

WARMUP, REQUESTS, WARMUP_TOKENS = 2, 3, 4


def prompt(tokens: int, vocab: int, number: int) -> list[int]:
    """Another prompt for each request, so that none is answered from what an earlier one left behind."""
    return [(i * 7919 + 13 + 101 * number) % min(vocab, 20000) for i in range(tokens)]


def tokens_each(passes: int) -> int:
    """Of each request that is measured, if they generate so many together."""
    return math.ceil(passes / REQUESTS)


def ask(
    llm: "LLM", prompt_tokens: int, number: int, tokens: int, on_event: Callable[[object], None] | None = None
) -> "Completion":
    """One of the requests. The tokens are sampled, always the same ones.

    Greedy decoding would not do: random weights soon repeat one token, and with it the experts that it uses.
    """
    ids = prompt(prompt_tokens, llm.config.vocab_size, number)
    return llm.generate(
        tokens=ids, max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=number, on_event=on_event, cache=False
    )

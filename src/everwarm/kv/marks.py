"""At which positions of a history it can be gone on from, where its layers have windows.

Blocks of windows are kept for these positions and nowhere else:

    the end of the history
    every so many tokens       the same for all histories, so that those that begin alike find each other's
    ends of messages           the first and the last few: there prompts are edited, and branch off

A prompt that is known up to some token is computed from the latest such position on: at most `every` tokens more than
if everything had been kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from everwarm.kv.layout import Layout

LAST_MESSAGES = 4
LEAST_BLOCKS, MOST_BLOCKS = 8, 64
"""Between two positions that all histories have in common."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Where windows are kept."""

    every: int  # tokens; 0: there are no windows
    ends: frozenset[int] = frozenset()  # tokens with which a message ends

    @staticmethod
    def of(layout: Layout, ends: frozenset[int] = frozenset()) -> "Marks":
        """So that windows take about as much as the keys and values of layers that see everything."""
        if not layout.reach:
            return Marks(0)
        window = layout.block_bytes("window") * layout.reach
        blocks = MOST_BLOCKS
        while blocks > LEAST_BLOCKS and window <= layout.block_bytes() * layout.block_tokens * blocks // 2:
            blocks //= 2
        return Marks(blocks * layout.block_tokens, ends)

    def positions(self, tokens: bytes) -> Iterator[int]:
        """Of a history, without its end. `tokens` are big-endian."""
        if not self.every:
            return
        yield from range(self.every, len(tokens) // 4, self.every)
        if self.ends:
            found = np.flatnonzero(np.isin(np.frombuffer(tokens, ">u4"), list(self.ends))) + 1
            yield from found[:1].tolist()
            yield from found[1:][-LAST_MESSAGES:].tolist()

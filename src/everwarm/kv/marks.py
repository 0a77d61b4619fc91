"""At which positions a history can be gone on from, where its layers have windows or a state.

Blocks of windows, and states, are kept for these positions and nowhere else:

    the end of the history     and the ends of its last turns
    every so many tokens       the same for all histories, so that those that begin alike find each other's
    ends of messages           the first and the last few: there prompts are edited, and branch off

A prompt that is known up to some token is computed from the latest such position on: at most `every` tokens more than
if everything had been kept.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from everwarm.kernels.backend import FULL
from everwarm.kv.layout import Layout

LAST_MESSAGES = 4
NEAR_BLOCKS = 2
LEAST_BLOCKS, MOST_BLOCKS = 8, 64
"""Between two positions that all histories have in common."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Where a history can be gone on from."""

    every: int = 0  # tokens; 0: everywhere
    block_tokens: int = 1  # states are kept between blocks
    ends: frozenset[int] = frozenset()  # tokens with which a message ends

    @staticmethod
    def of(layout: Layout, ends: frozenset[int] = frozenset()) -> "Marks":
        """So that what is kept at marks takes about as much as keys and values of layers that see everything."""
        apart = {kind: layout.block_bytes(kind) for kind in layout.kinds if kind != FULL}
        if not apart:
            return Marks()
        size = apart.get("window", 0) * layout.reach // layout.block_tokens + apart.get("state", 0)
        blocks = MOST_BLOCKS
        while blocks > LEAST_BLOCKS and size <= layout.block_bytes() * blocks // 2:
            blocks //= 2
        return Marks(blocks * layout.block_tokens, layout.block_tokens if layout.has_state else 1, ends)

    def positions(self, tokens: bytes, earlier: Iterable[int] = ()) -> Iterator[int]:
        """Of a history, without its end. `tokens` are big-endian. `earlier`: where it was gone on from until now."""
        if not self.every:
            return
        count = len(tokens) // 4
        yield from range(self.every, count, self.every)
        found = {position for position in earlier if position % self.every}
        if self.ends:
            ends = np.flatnonzero(np.isin(np.frombuffer(tokens, ">u4"), list(self.ends))) + 1
            found |= {int(end) // self.block_tokens * self.block_tokens for end in (*ends[:1], *ends[-LAST_MESSAGES:])}
        ordered = sorted(position for position in found if 0 < position < count)
        yield from ordered[:1]
        yield from self._thinned(ordered[1:])[-LAST_MESSAGES:]

    def _thinned(self, positions: list[int]) -> list[int]:
        """Without borders of blocks that lie just before the end of a turn: who edits a message behind them goes on
        from that end, so that the room is better used for an earlier turn.
        """
        size = self.block_tokens
        ends = [position for position in positions if position % size]
        return [
            position
            for position in positions
            if position % size or not any(position < end < position + NEAR_BLOCKS * size for end in ends)
        ]

    def last(self, count: int) -> int:
        """The last position of a prompt of so many tokens at which the same prompt can be gone on from."""
        return (count - 1) // self.block_tokens * self.block_tokens

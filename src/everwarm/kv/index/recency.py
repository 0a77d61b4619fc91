"""Which blocks were not used for longest: a queue for each rank, in each of them the longest unused first.

A path is touched from its end to its beginning, so a parent is always younger than its children: leaves go first.
Finding the next block takes the same time whatever the number of blocks.
"""

from collections import OrderedDict
from collections.abc import Callable
from itertools import count

from everwarm.kv.eviction import RANKS
from everwarm.kv.index.tree import Node

_clock = count()
"""Ticks at each use. All queues of a process share it, so that blocks of several models can be compared."""


class Recency:
    """Nodes in the order of their last use, each in the queue of its rank. When its rank changes, `refile`."""

    def __init__(self) -> None:
        self._queues: tuple[OrderedDict[int, tuple[Node, int]], ...] = tuple(OrderedDict() for _ in range(RANKS))
        self._rank_of: dict[int, int] = {}

    def touch(self, node: Node, rank: int) -> None:
        """It was used just now. A path is touched from its end to its beginning."""
        self.discard(node)
        self._rank_of[id(node)] = rank
        self._queues[rank][id(node)] = node, next(_clock)

    def refile(self, node: Node, rank: int) -> None:
        """Its rank may have changed. In a lower queue it becomes the first to go, in a higher one the last."""
        before = self._rank_of.get(id(node))
        if before is None or rank == before:
            return
        entry = self._queues[before].pop(id(node))
        self._rank_of[id(node)] = rank
        self._queues[rank][id(node)] = entry
        self._queues[rank].move_to_end(id(node), last=rank > before)

    def discard(self, node: Node) -> None:
        rank = self._rank_of.pop(id(node), None)
        if rank is not None:
            del self._queues[rank][id(node)]

    def oldest(self, rank: int, wanted: int, weigh: Callable[[Node], int], most: int | None = None) -> list[Node]:
        """Nodes of a rank, the longest unused first, until they weigh as much as is wanted, and at most `most`. What
        weighs nothing is in use now: it goes to the end of the queue, so that it is not looked at each time.
        """
        queue = self._queues[rank]
        found: list[Node] = []
        passed: list[Node] = []
        for node, _ in queue.values():
            if wanted <= 0 or len(found) == most:
                break
            weight = weigh(node)
            wanted -= weight
            (found if weight else passed).append(node)
        for node in passed:
            queue[id(node)] = node, next(_clock)
            queue.move_to_end(id(node))
        return found

    def last_use(self, rank: int) -> int | None:
        """When the first node of a rank was last used, as a tick; None if there is none."""
        first = next(iter(self._queues[rank].values()), None)
        return None if first is None else first[1]

    def __len__(self) -> int:
        return len(self._rank_of)

    def __contains__(self, node: Node) -> bool:
        return id(node) in self._rank_of

    def rank_of(self, node: Node) -> int | None:
        """The queue that it is in."""
        return self._rank_of.get(id(node))

"""Which blocks to let go of first: a queue for each rank, in each of them the longest unused first.

A path is touched from its end to its beginning, so a parent is always younger than its children: leaves go first.
Finding the next block to let go of takes the same time whatever the number of blocks.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

from everwarm.kv.tree import Node

RANKS = 6


def rank_on_disk(node: Node) -> int:
    """Blocks that no named agent owns, then those of named agents, then those of pinned ones."""
    return 2 if node.pinned else 1 if node.named else 0


class Recency:
    """Nodes in the order of their last use. `rank` says which queue a node belongs to; when that changes, `refile`."""

    def __init__(self, rank: Callable[[Node], int]) -> None:
        self._rank = rank
        self._queues: tuple[OrderedDict[int, Node], ...] = tuple(OrderedDict() for _ in range(RANKS))
        self._rank_of: dict[int, int] = {}

    def touch(self, path: Iterable[Node]) -> None:
        """The blocks of a path, from its end to its beginning, were used just now."""
        for node in path:
            self.discard(node)
            self._rank_of[id(node)] = rank = self._rank(node)
            self._queues[rank][id(node)] = node

    def refile(self, node: Node) -> None:
        """Its rank may have changed. In a lower queue it becomes the first to go, in a higher one the last."""
        before = self._rank_of.get(id(node))
        if before is None or (rank := self._rank(node)) == before:
            return
        del self._queues[before][id(node)]
        self._rank_of[id(node)] = rank
        self._queues[rank][id(node)] = node
        self._queues[rank].move_to_end(id(node), last=rank > before)

    def discard(self, node: Node) -> None:
        rank = self._rank_of.pop(id(node), None)
        if rank is not None:
            del self._queues[rank][id(node)]

    def oldest(self, rank: int, count: int, busy: Callable[[Node], bool]) -> list[Node]:
        """Up to `count` nodes of a rank, the longest unused first. A busy one is in use now: it goes to the end of the
        queue, so that it is not looked at each time.
        """
        queue = self._queues[rank]
        found: list[Node] = []
        passed: list[Node] = []
        for node in queue.values():
            if len(found) >= count:
                break
            (passed if busy(node) else found).append(node)
        for node in passed:
            queue.move_to_end(id(node))
        return found

    def __len__(self) -> int:
        return len(self._rank_of)

    def __contains__(self, node: Node) -> bool:
        return id(node) in self._rank_of

"""Which blocks to let go of first: those that no named agent owns, then the others, each from the longest unused on.

A path is touched from its end to its beginning, so a parent is always younger than its children: leaves go first.
"""

from collections import OrderedDict
from collections.abc import Iterable

from everwarm.kv.tree import Node


class Recency:
    """Two queues."""

    def __init__(self) -> None:
        self._queues: tuple[OrderedDict[int, Node], ...] = (OrderedDict(), OrderedDict())

    def touch(self, path: Iterable[Node]) -> None:
        """The blocks of a path, from its end to its beginning, were used just now."""
        for node in path:
            self.discard(node)
            self._queues[node.named > 0][id(node)] = node

    def discard(self, node: Node) -> None:
        for queue in self._queues:
            queue.pop(id(node), None)

    def oldest_first(self) -> list[Node]:
        return [node for queue in self._queues for node in queue.values()]

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, node: Node) -> bool:
        return any(id(node) in queue for queue in self._queues)

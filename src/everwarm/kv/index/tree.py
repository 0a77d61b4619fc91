"""Every block that is known, hot or warm, in a tree of prefixes.

A path from a root spells a token history; a node is the block of its last tokens. Full blocks have children, partial
ones (the ends of histories) do not. What layers of another kind need there (the last tokens that a window sees) is a
node of its own beside it, which may be missing. A node stays while it is hot, on disk, owned by an agent or has
children or something beside it. Nodes are changed by `Index` alone, with its lock held.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from everwarm.kernels.backend import FULL
from everwarm.kv.chain import Key, child_key
from everwarm.kv.receipt import Why

_tokens = attrgetter("tokens")


@dataclass(slots=True, eq=False)
class Node:
    """One block: its name, its tokens, and where its bytes are."""

    key: Key
    parent: "Node | None"  # None: a root, which has no bytes
    tokens: bytes = b""
    end: int = 0  # tokens of the history up to and with this block
    children: list["Node"] = field(default_factory=list)  # by tokens
    block: int | None = None  # hot: its handle in the pool
    on_disk: bool = False
    suspect: bool = False  # on disk, but a crash may lose it: the sync of its directory has failed
    writing: bool = False
    named: int = 0  # agents with a name that own it
    anonymous: int = 0
    pinned: int = 0  # of those, pinned
    claims: int = 0  # turns that use it (its ref count)
    lost: Why | None = None  # why it has no bytes any more
    kind: str = FULL
    beside: dict[str, "Node"] = field(default_factory=dict)  # the same tokens, for other kinds of layers
    main: "Node | None" = None  # of a node that lies beside another: that one

    @property
    def available(self) -> bool:
        return self.block is not None or self.on_disk

    @property
    def safe(self) -> bool:
        """Whether it can be dropped from memory and read again, also after a crash."""
        return self.on_disk and not self.suspect

    @property
    def owned(self) -> bool:
        return self.named + self.anonymous > 0

    @property
    def spoken_for(self) -> bool:
        """Whether anything needs it."""
        return bool(self.available or self.owned or self.claims or self.writing or self.children or self.beside)

    def path(self) -> list["Node"]:
        """From the first block to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def is_available(node: Node) -> bool:
    return node.available


def is_hot(node: Node) -> bool:
    return node.block is not None


def is_safe(node: Node) -> bool:
    return node.safe


NODE_BYTES = 1000
"""What a node takes in memory with its tokens and its places in tables, about."""


class Tree:
    """Nodes by name."""

    def __init__(self, block_tokens: int) -> None:
        self._block_bytes = 4 * block_tokens
        self.nodes: dict[Key, Node] = {}
        self.beside = 0  # how many nodes lie beside others

    def __len__(self) -> int:
        return len(self.nodes) + self.beside

    def root(self, key: Key) -> Node:
        if key not in self.nodes:
            self.nodes[key] = Node(key, None)
        return self.nodes[key]

    def child(self, parent: Node, tokens: bytes) -> Node:
        """The block of these tokens behind `parent`, made if it is not known."""
        at = bisect.bisect_left(parent.children, tokens, key=_tokens)
        if at < len(parent.children) and parent.children[at].tokens == tokens:
            return parent.children[at]
        node = Node(child_key(parent.key, tokens), parent, tokens, parent.end + len(tokens) // 4)
        parent.children.insert(at, node)
        self.nodes[node.key] = node
        return node

    def find_child(self, parent: Node, tokens: bytes) -> Node | None:
        """The block of these tokens behind `parent`, if it is known."""
        at = bisect.bisect_left(parent.children, tokens, key=_tokens)
        found = parent.children[at] if at < len(parent.children) else None
        return found if found is not None and found.tokens == tokens else None

    def beside_of(self, node: Node, kind: str) -> Node:
        """What another kind of layers has of the same tokens, made if it is not known."""
        found = node.beside.get(kind)
        if found is None:
            found = Node(node.key, node.parent, node.tokens, node.end, kind=kind, main=node)
            node.beside[kind] = found
            self.beside += 1
        return found

    def beginnings(self, parent: Node, tokens: bytes) -> Iterator[Node]:
        """The blocks behind `parent` whose tokens are a beginning of these, the longest first."""
        if len(parent.children) <= 64:
            found = [child for child in parent.children if tokens.startswith(child.tokens)]
            yield from sorted(found, key=lambda child: -child.end)
            return
        for length in range(len(tokens), 0, -4):
            if (child := self.find_child(parent, tokens[:length])) is not None:
                yield child

    def forget(self, node: Node) -> None:
        """Take nodes out that nothing speaks for any more: this one, then the one it lies beside, then its parents."""
        while node.parent is not None and not node.spoken_for:
            if node.main is not None:
                if node.main.beside.get(node.kind) is not node:
                    return
                del node.main.beside[node.kind]
                self.beside -= 1
                node = node.main
                continue
            parent = node.parent
            if self.nodes.get(node.key) is not node or parent is None:
                return
            del self.nodes[node.key]
            del parent.children[bisect.bisect_left(parent.children, node.tokens, key=_tokens)]
            node = parent

    def walk(self, root: Node, tokens: bytes) -> tuple[list[Node], Node | None, int]:
        """The full blocks that spell the beginning of `tokens`; then the block that shares most of what follows, if
        any does, and how many tokens it shares. Blocks whose bytes are lost end the walk.
        """
        path, node, at = [], root, 0
        while True:
            wanted = tokens[at : at + self._block_bytes]
            place = bisect.bisect_left(node.children, wanted, key=_tokens)
            if len(wanted) == self._block_bytes and place < len(node.children):
                found = node.children[place]
                if found.tokens == wanted and found.available:
                    path.append(found)
                    node, at = found, at + len(wanted)
                    continue
            best, shared = None, 0
            for candidate in _neighbours(node.children, place):
                common = common_tokens(candidate.tokens, wanted)
                if common > shared:
                    best, shared = candidate, common
            return path, best, shared


def _neighbours(children: list[Node], place: int) -> Iterator[Node]:
    """In sorted order the longest common prefix is next to where the wanted one would be."""
    for places in (range(place - 1, -1, -1), range(place, len(children))):
        for at in places:
            if children[at].available:
                yield children[at]
                break


def common_tokens(a: bytes, b: bytes) -> int:
    """Tokens that two histories have in common from their beginning."""
    size = min(len(a), len(b)) // 4
    if a[: 4 * size] == b[: 4 * size]:
        return size
    different = np.frombuffer(a, ">u4", size) != np.frombuffer(b, ">u4", size)
    return int(different.argmax())

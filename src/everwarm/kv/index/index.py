"""The index: every known block, where its bytes are, who needs it, and what may leave memory.

It owns the tree, the pool of blocks in memory, both queues of recency and the lock that guards them. It is the only
place that changes a `Node`. It touches no file: the warm tier tells it what was saved and what is gone.

A block in the tree is never written again. It leaves memory only when it is on disk, when nobody wants it, or when
nothing can be saved.

Layers with a window need only the last tokens before the one that is computed. Their blocks lie beside the others, and
not everywhere: `resume` finds the latest position at which all of them are there.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from everwarm.kernels.backend import FULL, STATE, WINDOW, BlockMemory
from everwarm.kv.chain import Key
from everwarm.kv.counts import Counts
from everwarm.kv.eviction import AS_A_LAST_RESORT, AT_REST, WHILE_SAVING, Worth, rank_in_memory, worth
from everwarm.kv.index.pool import BlockPool, Ledger, SequenceKV, Windows
from everwarm.kv.index.recency import Recency
from everwarm.kv.index.tree import NODE_BYTES, Node, Tree, is_available
from everwarm.kv.receipt import Cause, Why

STEP_TOKENS = 512
"""What a step may compute of one sequence: so much more than a window sees is in memory meanwhile."""


class Saver(Protocol):
    """Whoever brings blocks to disk."""

    @property
    def busy(self) -> bool:
        """Whether something waits to be written, or is being written."""

    def wait_for_progress(self) -> bool:
        """Wait until one more thing was written; False if there is nothing to wait for."""


@dataclass(frozen=True, slots=True)
class Resume:
    """From where a history can go on, and what that needs."""

    position: int  # tokens that need not be computed
    path: list[Node]  # the blocks that hold them
    windows: dict[int, Node] = field(default_factory=dict)  # by number of block
    state: Node | None = None

    @property
    def nodes(self) -> list[Node]:
        return [*self.path, *self.windows.values(), *([] if self.state is None else [self.state])]


@dataclass(frozen=True, slots=True)
class Superseded:
    """What an agent has owned until now, and how."""

    nodes: list[Node]
    anonymous: bool
    pinned: bool


class Index:
    """The blocks of one model. Methods that are marked so are called with `lock` held."""

    def __init__(
        self,
        memory: BlockMemory | Mapping[str, BlockMemory],
        budget: int | None = None,
        *,
        reach: int = 0,
        node_bytes: int = NODE_BYTES,
    ) -> None:
        """`memory`, perhaps by kind of block. `reach`: how many tokens back windows see, the own one included.
        `node_bytes`: what a node is charged with; tests with tiny blocks charge nothing.
        """
        memories = memory if isinstance(memory, Mapping) else {FULL: memory}
        self._ledger = Ledger(budget, self)
        self.pools = {kind: BlockPool(one, ledger=self._ledger) for kind, one in memories.items()}
        self.pool = self.pools[FULL]
        self.windows = Windows(self.pools[WINDOW], reach) if WINDOW in self.pools else None
        self.states = self.pools.get(STATE)
        self.lock: threading.RLock = self._ledger.lock
        self.tree = Tree(self.pool.block_tokens)
        self.hot = Recency()
        self.warm = Recency()
        self.counts = Counts()
        self._node_bytes = node_bytes
        self._saver: Saver | None = None
        self._not_saved = "the store is switched off"

    @property
    def block_tokens(self) -> int:
        return self.pool.block_tokens

    @property
    def block_bytes(self) -> int:
        """Of a block of layers that see everything."""
        return self.pool.block_bytes

    @property
    def layer_bytes(self) -> dict[str, Sequence[int]]:
        """What each layer that stores something takes of a block of its kind."""
        return {kind: pool.memory.layer_bytes for kind, pool in self.pools.items()}

    @property
    def bytes_in_use(self) -> int:
        return self._ledger.used

    @property
    def budget(self) -> int | None:
        return self._ledger.budget

    @property
    def most_bytes(self) -> int | None:
        """Of blocks; None if there is no limit."""
        return self._ledger.most

    def bytes_for(self, tokens: int) -> int:
        """What the blocks of so many tokens, and a little more, take while they are computed."""
        blocks = -(-tokens // self.block_tokens) + 1
        size = blocks * self.block_bytes
        if self.windows is not None:
            pool, seen = self.windows.pool, -(-(self.windows.reach + STEP_TOKENS) // self.block_tokens) + 2
            size += min(blocks, seen) * pool.block_bytes
        return size if self.states is None else size + 2 * self.states.block_bytes

    def has_free(self, size: int) -> bool:
        """Whether so many bytes fit beside all that is in memory."""
        free = self._ledger.free
        return free is None or size <= free

    def resize(self, budget: int | None) -> None:
        self._ledger.budget = budget

    def sequence(self, capacity: int) -> SequenceKV:
        """An empty sequence in this memory."""
        return SequenceKV(self.pool, capacity, self.windows, self.states)

    def pool_of(self, node: Node) -> BlockPool:
        return self.pools[node.kind]

    def save_with(self, saver: Saver, not_saved: str) -> None:
        """From now on blocks are saved by `saver`, or they are not: `not_saved` says why."""
        with self.lock:
            self._saver, self._not_saved = saver, not_saved

    # Finding ----------------------------------------------------------------------------------------------------------

    def root(self, key: Key) -> Node:
        with self.lock:
            return self.tree.root(key)

    def find(self, key: Key) -> Node | None:
        with self.lock:
            return self.tree.nodes.get(key)

    def walk(self, root: Node, tokens: bytes) -> tuple[list[Node], Node | None, int]:
        """See `Tree.walk`. With `lock` held."""
        return self.tree.walk(root, tokens)

    def chain(self, root: Key, tokens: bytes, keys: Sequence[Key]) -> list[Node]:
        """The nodes of these blocks, from the beginning on, as far as they bear the names of these tokens. Nodes that
        are not known are made.
        """
        size = 4 * self.block_tokens
        with self.lock:
            node, chain = self.tree.root(root), list[Node]()
            for number, key in enumerate(keys):
                part = tokens[number * size : (number + 1) * size]
                node = self.tree.child(node, part) if part else node
                if not part or node.key != key:
                    self.tree.forget(node)
                    break
                chain.append(node)
            self._charge()
            return chain

    def alone(self, chain: list[Node], beside: Iterable[Node] = ()) -> list[Node]:
        """Blocks that only the owner of this chain owns and nobody uses, children first: those of the chain, and what
        once branched off from them; what lies beside these, and of what the owner has `beside` the others. With `lock`
        held.
        """
        found: list[Node] = []
        left = [node for node in chain if node.named + node.anonymous == 1 and not node.claims][:1]
        while left:
            node = left.pop()
            found.append(node)
            found += (one for one in node.beside.values() if not one.owned)
            left += node.children
        found += (node for node in beside if node.named + node.anonymous == 1)
        return found[::-1]

    def is_partial(self, node: Node) -> bool:
        """Whether it is the end of a history, and not full."""
        return len(node.tokens) < 4 * self.block_tokens

    def resume(
        self,
        path: list[Node],
        wanted: int,
        is_usable: Callable[[Node], bool] = is_available,
        without: Collection[int] = (),
    ) -> Resume:
        """The latest position, at most `wanted`, from which a history can go on with blocks that are usable; `without`
        those of these ids. `path`: the blocks of its beginning, as far as it is known. With `lock` held.
        """

        def usable(node: Node) -> bool:
            return is_usable(node) and id(node) not in without

        size = self.block_tokens
        unusable = next((number for number, node in enumerate(path) if not usable(node)), len(path))
        for position, state in self._candidates(path, min(wanted, unusable * size), usable):
            numbers = self.windows.numbers(position) if self.windows is not None else range(0)
            found = {number: path[number].beside.get(WINDOW) for number in numbers}
            sound = {number: node for number, node in found.items() if node is not None and usable(node)}
            if len(sound) == len(found):
                return Resume(position, path[: -(-position // size)], sound, state)
        return Resume(0, [])

    def _candidates(
        self, path: list[Node], wanted: int, usable: Callable[[Node], bool]
    ) -> Iterator[tuple[int, Node | None]]:
        """Positions that may be gone on from, the latest first: of each block the last one that is wanted, or those
        after which a state is there. `path` leads to all of them.
        """
        size = self.block_tokens
        for number in range(-(-wanted // size) - 1, -1, -1):
            most = min(wanted, (number + 1) * size)
            if self.states is None:
                yield most, None
                continue
            parent = path[number].parent
            assert parent is not None
            for node in self.tree.beginnings(parent, path[number].tokens[: 4 * (most - number * size)]):
                state = node.beside.get(STATE)
                if state is not None and usable(state):
                    yield node.end, state

    def beside(self, chain: list[Node], tokens: bytes, positions: Iterable[int], *, make: bool = False) -> list[Node]:
        """What lies beside a chain of these tokens so that it can be gone on from at these positions: the nodes that
        are known, or all of them, made if they are not.
        """
        if self.windows is None and self.states is None:
            return []
        with self.lock:
            found: dict[int, tuple[Node, str]] = {}
            for position in positions:
                for number in self.windows.numbers(position) if self.windows is not None else ():
                    if number < len(chain):
                        found[id(chain[number])] = chain[number], WINDOW
            main = list(found.values())
            if self.states is not None:
                ends = (self._node_at(chain, tokens, position, make) for position in positions)
                main += [(node, STATE) for node in ends if node is not None]
            return [self.tree.beside_of(node, kind) for node, kind in main if make or kind in node.beside]

    def _node_at(self, chain: list[Node], tokens: bytes, position: int, make: bool) -> Node | None:
        """The node of a chain that ends at a position: one of its own, or a partial block that its history ended with
        once.
        """
        size = self.block_tokens
        number = -(-position // size) - 1
        if not 0 <= number < len(chain):
            return None
        if chain[number].end == position:
            return chain[number]
        parent, part = chain[number].parent, tokens[4 * number * size : 4 * position]
        assert parent is not None
        return self.tree.child(parent, part) if make else self.tree.find_child(parent, part)

    # Use --------------------------------------------------------------------------------------------------------------

    def seal(self, parent: Node, tokens: bytes, block: int) -> tuple[Node, int] | None:
        """Make a block known that will not be written any more. Returns its node and the block to use from now on: if
        the same was computed before, that one. None if the block belongs to another node, of which these tokens are
        only the beginning: two nodes never share a block.
        """
        with self.lock:
            node = self.tree.child(parent, tokens)
            if node.block is None and self.pool.owners(block) > 1:
                self.tree.forget(node)
                return None
            return node, self._fill(node, block)

    def seal_beside(self, node: Node, kind: str, block: int) -> tuple[Node, int] | None:
        """The same for a block of another kind that lies beside a node. None if it is that of another node."""
        with self.lock:
            beside = self.tree.beside_of(node, kind)
            if beside.block is None and self.pools[kind].owners(block) > 1:
                self.tree.forget(beside)
                return None
            return beside, self._fill(beside, block)

    def _fill(self, node: Node, block: int) -> int:
        """The block is the node's, unless it has one already. The block to use from now on."""
        pool = self.pool_of(node)
        node.lost = None
        if node.block is None:
            node.block = pool.hold(block)
        elif node.block != block:
            pool.hold(node.block)
            pool.drop([block])
        self._touch_hot(node)
        self._charge()
        return node.block

    def hot_path(self, parent: Node, tokens: bytes) -> list[Node]:
        """The full blocks of these tokens behind `parent` that are in memory, from the first on. With `lock` held."""
        size, path = 4 * self.block_tokens, list[Node]()
        for at in range(0, len(tokens) - size + 1, size):
            node = self.tree.find_child(path[-1] if path else parent, tokens[at : at + size])
            if node is None or node.block is None:
                break
            path.append(node)
        return path

    def claim_child(self, parent: Node, tokens: bytes) -> Node:
        """The block of these tokens behind `parent`, made if it is not known, in use until it is released."""
        with self.lock:
            node = self.tree.child(parent, tokens)
            node.claims += 1
            self._charge()
            return node

    def claim(self, nodes: Iterable[Node]) -> None:
        """A turn uses them: nothing deletes their files."""
        with self.lock:
            for node in nodes:
                node.claims += 1

    def release(self, nodes: Iterable[Node]) -> None:
        with self.lock:
            for node in nodes:
                node.claims -= 1
                self.tree.forget(node)
            self._charge()

    def add_owner(self, chain: list[Node], *, anonymous: bool, pinned: bool) -> None:
        self._count_owner(chain, +1, anonymous, pinned)

    def remove_owner(self, chain: list[Node], *, anonymous: bool, pinned: bool) -> None:
        """The nodes stay until `forget`."""
        self._count_owner(chain, -1, anonymous, pinned)

    def give_up(self, superseded: Superseded) -> list[Node]:
        """An agent does not own this any more. Returns what is of no use to anybody now: ends of histories that have
        grown into other blocks, and what lay beside a chain.
        """
        with self.lock:
            self.remove_owner(superseded.nodes, anonymous=superseded.anonymous, pinned=superseded.pinned)
            unused = [
                node
                for node in superseded.nodes
                if (node.main is not None or self.is_partial(node)) and not node.owned and not node.claims
            ]
            for node in superseded.nodes:
                self.tree.forget(node)
            return unused

    def _count_owner(self, chain: list[Node], change: int, anonymous: bool, pinned: bool) -> None:
        with self.lock:
            for node in chain:
                if anonymous:
                    node.anonymous += change
                else:
                    node.named += change
                node.pinned += change if pinned else 0
                self._refile(node)

    def touch(self, chain: list[Node]) -> None:
        """A path was used just now."""
        with self.lock:
            for main in reversed(chain):
                for node in (*main.beside.values(), main) if main.beside else (main,):
                    if node.block is not None:
                        self._touch_hot(node)
                    if node.on_disk:
                        self.warm.touch(node, _worth(node))
            self._charge()

    def forget(self, node: Node) -> None:
        """Take it out of the tree, and its parents, if nothing needs them any more."""
        with self.lock:
            self.tree.forget(node)

    # Memory -----------------------------------------------------------------------------------------------------------

    def hold(self, node: Node) -> int | None:
        """One more owner for the node's block; None if it is not in memory."""
        with self.lock:
            return None if node.block is None else self.pool_of(node).hold(node.block)

    def hold_all(self, nodes: list[Node]) -> dict[int, int]:
        """The same for many: which of them are in memory, by number, and their blocks."""
        with self.lock:
            return {
                number: self.pool_of(node).hold(node.block)
                for number, node in enumerate(nodes)
                if node.block is not None
            }

    def drop(self, node: Node, block: int) -> None:
        """One owner fewer for a block of the node's kind."""
        self.pool_of(node).drop([block])

    def made_hot(self, node: Node, block: int) -> int:
        """A block was read from disk. The block to use from now on: if another turn was faster, the one it read."""
        with self.lock:
            pool = self.pool_of(node)
            if node.block is None:
                node.block = pool.hold(block)
                self._touch_hot(node)
            else:
                pool.hold(node.block)
                pool.drop([block])
            return node.block

    def cool(self, node: Node, forced: bool = False) -> bool:
        """Drop a block from memory if nobody computes with it or writes it, and it can come back or nobody wants it."""
        with self.lock:
            if not self._may_cool(node, forced):
                return False
            assert node.block is not None
            self.drop(node, node.block)
            node.block = None
            self.hot.discard(node)
            if not node.on_disk:
                node.lost = Why(Cause.EVICTED, self._not_saved or "dropped from memory before it could be saved")
            self.tree.forget(node)
            return True

    def drop_all(self) -> None:
        """Free all memory that no sequence uses."""
        with self.lock:
            for main in list(self.tree.nodes.values()):
                for node in (main, *main.beside.values()):
                    if node.block is not None:
                        self.drop(node, node.block)
                        node.block = None

    def reclaim(self, size: int) -> None:
        """Let go of so many bytes of blocks that no sequence uses, in the order of `kv.eviction`."""
        with self.lock:
            busy = self._saver is not None and self._saver.busy
            for rank in WHILE_SAVING if busy else AT_REST:
                size -= self._cool_oldest(rank, size, forced=False)
            for rank in () if busy else AS_A_LAST_RESORT:
                size -= self._cool_oldest(rank, size, forced=True)

    def wait(self) -> bool:
        return self._saver is not None and self._saver.wait_for_progress()

    def _cool_oldest(self, rank: int, size: int, *, forced: bool) -> int:
        """The bytes that were freed."""
        if size <= 0:
            return 0
        nodes = self.hot.oldest(
            rank, size, lambda node: self.pool_of(node).block_bytes if self._may_cool(node, forced) else 0
        )
        cooled = [node for node in nodes if self.cool(node, forced)]
        self.counts.events["hot_evictions"] += len(cooled)
        return sum(self.pool_of(node).block_bytes for node in cooled)

    def _may_cool(self, node: Node, forced: bool) -> bool:
        if node.block is None or self.pool_of(node).owners(node.block) > 1:
            return False
        unwanted = not (node.owned or node.claims)
        return node.safe or bool(self._not_saved) or unwanted or forced

    def _touch_hot(self, node: Node) -> None:
        self.hot.touch(node, self.rank_in_memory(node))

    def _refile(self, node: Node) -> None:
        """Who owns it, or where it is, has changed."""
        self.hot.refile(node, self.rank_in_memory(node))
        self.warm.refile(node, _worth(node))

    def rank_in_memory(self, node: Node) -> int:
        """In which of the queues of `hot` it belongs."""
        return rank_in_memory(_worth(node), node.safe or not node.owned or bool(self._not_saved))

    def _charge(self) -> None:
        """The tree takes memory, too."""
        self._ledger.charged = self._node_bytes * len(self.tree)

    # Disk -------------------------------------------------------------------------------------------------------------

    def begin_write(self, node: Node) -> int | None:
        """The node's block, held until `end_write`. None if there is nothing to write, or somebody does already."""
        with self.lock:
            if self._not_saved or node.safe or node.writing or node.block is None:
                return None
            node.writing = True
            return self.pool_of(node).hold(node.block)

    def end_write(self, node: Node, block: int) -> None:
        with self.lock:
            node.writing = False
            self.drop(node, block)
            self.tree.forget(node)

    def saved(self, node: Node) -> None:
        """Its bytes are on disk now."""
        with self.lock:
            node.on_disk, node.suspect, node.lost = True, False, None
            self.warm.touch(node, _worth(node))
            self._refile(node)

    def suspect(self, nodes: Iterable[Node]) -> None:
        """A crash may lose their files: they have to be written again before a manifest may rely on them."""
        with self.lock:
            for node in nodes:
                node.suspect = node.on_disk
                self._refile(node)

    def gone(self, node: Node, why: Why | None) -> None:
        """Its bytes can't be had from disk any more."""
        with self.lock:
            node.on_disk, node.suspect, node.lost = False, False, why
            self.warm.discard(node)
            self._refile(node)

    def oldest_on_disk(self, rank: int, wanted: int, weigh: Callable[[Node], int], most: int) -> list[Node]:
        """Nodes on disk that no turn uses, the longest unused first, until they weigh as much as is wanted."""
        with self.lock:
            return self.warm.oldest(rank, wanted, lambda node: 0 if node.claims else weigh(node), most)

    def why_lost(self, chain: list[Node], cached_tokens: int) -> Why | None:
        """Why the block after these tokens is not there; None if it is."""
        with self.lock:
            for node in chain:
                if node.end > cached_tokens and not node.available:
                    return node.lost or Why(Cause.EVICTED, "evicted by quota")
        return None


def _worth(node: Node) -> Worth:
    return worth(node.named > 0, node.pinned > 0)

"""The blocks of one turn: what it holds on to, what of it is sealed, and which windows and states it keeps.

A block that is full is sealed at once, so that other turns find it, and is on its way to disk. Windows are known while
the turn sees them; windows and states are kept only at marks (`kv.marks`). One thread at a time uses them.
"""

import bisect
from collections.abc import Iterable, Iterator
from itertools import takewhile

from everwarm.kernels.backend import STATE, WINDOW
from everwarm.kv.histories import Histories, History
from everwarm.kv.index.pool import GONE, SequenceKV
from everwarm.kv.index.tree import Node, common_tokens
from everwarm.kv.marks import Marks


class TurnBlocks:
    """Owns the sequence's memory and the claims on nodes of the index."""

    def __init__(self, histories: Histories, marks: Marks, kv: SequenceKV) -> None:
        self._histories, self._index = histories, histories.index
        self._rule = marks
        self.kv = kv
        self.tokens = b""  # those of the prompt and, as they come, of the answer; big-endian
        self.root: Node | None = None
        self.full: list[Node] = []  # full blocks that are sealed
        self.claimed: list[Node] = []
        self.marks: list[int] = []  # positions of the prompt whose windows and states are kept, in order
        self._windows: dict[int, Node] = {}  # what was sealed of windows, by number of block

    @property
    def end_of_full(self) -> int:
        """Tokens in full blocks."""
        return len(self.full) * self._index.block_tokens

    @property
    def parent(self) -> Node:
        """What the next block follows."""
        assert self.root is not None
        return self.full[-1] if self.full else self.root

    @property
    def stop(self) -> int | None:
        """The position that the next step must not go beyond: a state has to be kept there. None: there is none."""
        if self._index.states is None:
            return None
        at, every = self.kv.length, self._rule.every
        following = bisect.bisect_right(self.marks, at)
        return min([*self.marks[following : following + 1], (at // every + 1) * every])

    def begin(self, tokens: bytes, marks: Iterable[int]) -> None:
        """These are the tokens of the prompt, and the positions of it whose windows and states are kept."""
        self.tokens, self.marks = tokens, sorted(marks)

    def append(self, tokens: bytes) -> None:
        """These tokens follow."""
        self.tokens += tokens

    def follow(self, root: Node | None, full: list[Node]) -> None:
        """The sequence begins at this root and has these full blocks."""
        self.root, self.full = root, full

    def claim(self, nodes: list[Node]) -> None:
        self._index.claim(nodes)
        self.claimed += nodes

    def keep_claims(self, nodes: list[Node]) -> None:
        """Let go of all nodes but these."""
        kept = set(map(id, nodes))
        claimed, self.claimed = self.claimed, []
        self.claimed = [node for node in claimed if id(node) in kept]
        self._index.release(node for node in claimed if id(node) not in kept)

    def seal_full(self, wait: bool = True) -> None:
        """Hand over the blocks that have been filled since. Without `wait`, what the writer can't take yet is left to
        the commit.
        """
        size = self._index.block_tokens
        while self.end_of_full + size <= self.kv.length:
            node = self._seal(self.end_of_full, self.end_of_full + size, wait)
            assert node is not None, "a full block was computed here, or is known"
            self.full.append(node)
        if self._index.states is not None and self._is_mark(self.kv.length):
            self._keep_state(self.full[-1], wait)
        self.drop_unseen()

    def seal_rest(self, wait: bool) -> list[Node]:
        """Seal everything that was computed, the partial block at the end as well; all of the chain."""
        self.seal_full(wait)
        covered = min(self.kv.length, len(self.tokens) // 4)
        chain = list(self.full)
        if covered > self.end_of_full:
            end = self._seal(self.end_of_full, covered, wait)
            chain += [end] if end is not None else []
        if (windows := self._index.windows) is not None and chain:
            for number in windows.numbers(chain[-1].end):
                self._seal_window(chain[number], number)
                self._keep_window(number, wait)
        if self._index.states is not None and chain and chain[-1].end == self.kv.length:
            self._keep_state(chain[-1], wait)
        return chain

    def give_up_memory(self) -> None:
        """What was sealed stays known."""
        self.kv.close()
        self.full, self._windows = [], {}

    def drop_unseen(self) -> None:
        """Windows that this turn does not see any more and nobody keeps leave memory."""
        blocks = self.kv.windows
        for number in [n for n in self._windows if n >= len(blocks) or blocks[n] == GONE]:
            self._index.cool(self._windows.pop(number))

    def positions(self, chain: list[Node], history: History, prompt_tokens: int) -> tuple[int, ...]:
        """Where this history can be gone on from later. `history`: as it was before this turn."""
        index, end = self._index, chain[-1].end if chain else 0
        if not self._rule.every or not end:
            return ()
        common = common_tokens(history.tokens, self.tokens)
        earlier = [position for position in history.positions if position <= common]
        earlier.append(self._rule.last(prompt_tokens))
        marks = {*self._rule.positions(self.tokens[: 4 * end], earlier), end}
        with index.lock:
            return tuple(position for position in sorted(marks) if index.resume(chain, position).position == position)

    def _seal(self, begin: int, end: int, wait: bool) -> Node | None:
        """The node of a block that will not be written any more; None if it is the beginning of another one."""
        number = begin // self._index.block_tokens
        sealed = self._index.seal(self.parent, self.tokens[4 * begin : 4 * end], self.kv.blocks[number])
        if sealed is None:
            return None
        node, self.kv.blocks[number] = sealed
        self.claim([node])
        self._histories.save_block(node, wait)
        if (windows := self._index.windows) is not None:
            self._seal_window(node, number)
            if any(number in windows.numbers(mark) for mark in self._marks_from(begin, windows.reach)):
                self._keep_window(number, wait)
        return node

    def _seal_window(self, node: Node, number: int) -> None:
        block = self.kv.windows[number]
        sealed = self._index.seal_beside(node, WINDOW, block) if block != GONE else None
        if sealed is not None:
            self._windows[number], self.kv.windows[number] = sealed

    def _keep_window(self, number: int, wait: bool) -> None:
        node = self._windows.pop(number, None)
        if node is not None:
            self.claim([node])
            self._histories.save_block(node, wait)

    def _marks_from(self, begin: int, reach: int) -> Iterator[int]:
        """The marks from which the block that begins here may be seen."""
        every = self._rule.every
        yield (begin // every + 1) * every
        at = bisect.bisect_right(self.marks, begin)
        yield from takewhile(lambda mark: mark <= begin + self._index.block_tokens + reach, self.marks[at:])

    def _is_mark(self, position: int) -> bool:
        """Whether a state is to be kept after so many tokens, which fill blocks."""
        if not position or position % self._index.block_tokens:
            return False
        at = bisect.bisect_left(self.marks, position)
        return position % self._rule.every == 0 or position in self.marks[at : at + 1]

    def _keep_state(self, node: Node, wait: bool) -> None:
        """The state of now is that behind a node's tokens."""
        assert node.end == self.kv.length
        sealed = self._index.seal_beside(node, STATE, self.kv.state)
        if sealed is not None:
            beside, block = sealed
            self.kv.use_state(block)
            self.claim([beside])
            self._histories.save_block(beside, wait)

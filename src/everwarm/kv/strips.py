"""Pictures of what is stored: an agent as a strip of blocks, and all agents as a tree of shared prefixes.

In: agents and the index. Out: values. The lock of the index is held for one agent at a time, so that nobody who
computes waits for a picture.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from everwarm.kernels.backend import STATE
from everwarm.kv.agent import Agent
from everwarm.kv.histories import Histories
from everwarm.kv.index.tree import Node


@dataclass(frozen=True, slots=True)
class Strip:
    """The blocks of an agent, in order. A kind is `hot`, `warm` or `missing`; with `-shared`, others own the block."""

    block_tokens: int
    runs: tuple[tuple[str, int], ...]  # a kind, and how many blocks of it follow each other
    states: tuple[int, ...]  # positions where a state is kept, for models with recurrent layers


@dataclass(slots=True)
class Prefix:
    """A piece of history that the same agents have in common, up to where they part or end."""

    begin: int  # tokens before it
    end: int
    owners: int  # agents whose history goes through it
    blocks: int
    hot: int  # of these in memory
    warm: int  # of these on disk only
    first: bytes  # tokens of its first block, four bytes each, big-endian
    agents: list[str] = field(default_factory=list)  # that end here
    children: list["Prefix"] = field(default_factory=list)


def strip(histories: Histories, agent: Agent) -> Strip:
    index = histories.index
    with index.lock:
        kinds = [_kind(node) for node in agent.chain()]
        states = sorted({node.end for node in agent.beside if node.kind == STATE})
    runs = tuple((kind, len(list(group))) for kind, group in groupby(kinds))
    return Strip(index.block_tokens, runs, tuple(states))


def _kind(node: Node) -> str:
    where = "hot" if node.block is not None else "warm" if node.on_disk else "missing"
    return where + ("-shared" if node.named + node.anonymous > 1 else "")


@dataclass(slots=True)
class _Step:
    """A node of the tree on the way from a root to agents."""

    node: Node
    owners: int = 0
    agents: list[str] = field(default_factory=list)
    children: dict[int, "_Step"] = field(default_factory=dict)  # by the identity of their node

    def count_owner(self) -> None:
        self.owners += 1


def shared_prefixes(histories: Histories, agents: Iterable[Agent]) -> list[Prefix]:
    """The histories of these agents as trees: one for each beginning that has nothing in common with others."""
    index, roots = histories.index, dict[int, _Step]()
    for agent in agents:
        with index.lock:
            chain = agent.chain()
        steps = roots
        step = None
        for node in chain:
            step = steps.setdefault(id(node), _Step(node))
            step.count_owner()
            steps = step.children
        if step is not None:
            step.agents.append(agent.name)
    return [_compressed(step) for step in roots.values()]


def _compressed(first: _Step) -> Prefix:
    """A chain of nodes without a fork and without an agent's end is one piece."""
    top = Prefix(0, 0, 0, 0, 0, 0, b"")
    left: list[tuple[_Step, Prefix]] = [(first, top)]
    while left:
        step, parent = left.pop()
        chain = [step]
        while len(step.children) == 1 and not step.agents:
            step = next(iter(step.children.values()))
            chain.append(step)
        nodes = [one.node for one in chain]
        hot = sum(node.block is not None for node in nodes)
        warm = sum(node.block is None and node.on_disk for node in nodes)
        begin = nodes[0].end - len(nodes[0].tokens) // 4
        piece = Prefix(begin, nodes[-1].end, step.owners, len(nodes), hot, warm, nodes[0].tokens, step.agents)
        parent.children.append(piece)
        left += [(child, piece) for child in step.children.values()]
    for piece in _all(top.children):
        piece.children.sort(key=lambda child: (-child.owners, child.begin - child.end))
    return top.children[0]


def _all(pieces: Sequence[Prefix]) -> Iterable[Prefix]:
    left = list(pieces)
    while left:
        piece = left.pop()
        yield piece
        left += piece.children

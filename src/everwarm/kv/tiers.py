"""Where an agent's blocks are, and bringing them into memory ahead of its next turn."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from everwarm.kv.agent import Agent
from everwarm.kv.pool import SequenceKV
from everwarm.kv.receipt import Receipt
from everwarm.kv.restore import restore
from everwarm.kv.tree import Node

if TYPE_CHECKING:
    from everwarm.kv.store import AgentStore


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """What the agent's next turn would find."""

    tier: str  # hot, warm (something is to be read from disk) or cold (nothing is there)
    tokens: int  # of its history whose KV is there without a gap
    hot_bytes: int
    warm_bytes: int  # on disk, whether or not it is in memory, too


@dataclass(frozen=True, slots=True)
class Warmed:
    """What bringing an agent into memory has done."""

    tier: str
    cached_tokens: int  # that its next turn need not compute
    restored_blocks: int
    restored_bytes: int
    restore_s: float
    reason: str  # why not all of it; empty if it is


def whereabouts(store: "AgentStore", agent: "Agent") -> Whereabouts:
    with store.lock:
        chain = agent.chain()
        there = _beginning(chain)
        hot = sum(node.block is not None for node in chain)
        warm = sum(node.on_disk for node in chain)
        tier = "cold" if not there else "hot" if all(node.block is not None for node in there) else "warm"
        tokens = there[-1].end if there else 0
    file_bytes = 0 if store.disk is None else store.disk.block_file_bytes
    return Whereabouts(tier, tokens, hot * store.pool.block_bytes, warm * file_bytes + agent.manifest_bytes)


def warm_up(store: "AgentStore", agent: "Agent") -> Warmed:
    """Read an agent's blocks into memory. A turn that goes on meanwhile is not disturbed."""
    with store.lock:
        nodes = _beginning(agent.chain())
        for node in nodes:
            node.claims += 1
    receipt = Receipt(agent.name)
    kv = SequenceKV(store.pool, len(nodes) * store.pool.block_tokens)
    try:
        usable, why = restore(store, kv, nodes, receipt, always=True)
        with store.lock:
            store.hot.touch(node for node in reversed(nodes[:usable]) if node.block is not None)
            store.warm.touch(nodes[:usable])
    finally:
        kv.close()
        with store.lock:
            for node in reversed(nodes):
                node.claims -= 1
                store.tree.forget(node)
    now = whereabouts(store, agent)
    return Warmed(
        now.tier,
        nodes[usable - 1].end if usable else 0,
        receipt.restored_blocks,
        receipt.restored_bytes,
        receipt.restore_s,
        why or ("" if usable and agent.kv_tokens <= nodes[usable - 1].end else store.why_lost(agent, now.tokens)),
    )


def _beginning(chain: list[Node]) -> list[Node]:
    """Up to the first block that is lost."""
    lost = next((i for i, node in enumerate(chain) if not node.available), len(chain))
    return chain[:lost]

"""Where an agent's blocks are: what its next turn would find."""

from dataclasses import dataclass

from everwarm.kv.agent import Agent
from everwarm.kv.histories import Histories
from everwarm.kv.index.tree import Node
from everwarm.kv.receipt import Receipt
from everwarm.kv.warm.restore import Restorer


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


def whereabouts(histories: Histories, agent: Agent) -> Whereabouts:
    index, tier = histories.index, histories.tier
    with index.lock:
        chain = agent.chain()
        there = _beginning(chain)
        hot = sum(node.block is not None for node in chain)
        warm = sum(node.on_disk for node in chain)
        where = "cold" if not there else "hot" if all(node.block is not None for node in there) else "warm"
        tokens = there[-1].end if there else 0
    saved = 0 if tier is None else warm * tier.block_bytes + tier.manifests.size((agent.tenant, agent.name))
    return Whereabouts(where, tokens, hot * index.block_bytes, saved)


def warm_up(histories: Histories, restorer: Restorer, agent: Agent) -> Warmed:
    """Read an agent's blocks into memory. A turn that goes on meanwhile is not disturbed."""
    index = histories.index
    with index.lock:
        nodes = _beginning(agent.chain())
        index.claim(nodes)
    receipt = Receipt(agent.name)
    kv = index.sequence(len(nodes) * index.block_tokens)
    try:
        usable, why = restorer.restore(kv, nodes, receipt, always=True)
        index.touch(nodes[:usable])
    finally:
        kv.close()
        index.release(reversed(nodes))
    now = whereabouts(histories, agent)
    if why is None and not (usable and agent.kv_tokens <= nodes[usable - 1].end):
        why = index.why_lost(agent.chain(), now.tokens)
    return Warmed(
        now.tier,
        nodes[usable - 1].end if usable else 0,
        receipt.restored_blocks,
        receipt.restored_bytes,
        receipt.restore_s,
        why.text if why is not None else "",
    )


def _beginning(chain: list[Node]) -> list[Node]:
    """Up to the first block that is lost."""
    lost = next((i for i, node in enumerate(chain) if not node.available), len(chain))
    return chain[:lost]

"""Where an agent's blocks are: what its next turn would find."""

from dataclasses import dataclass

from everwarm.kv.agent import Agent
from everwarm.kv.histories import Histories
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
        found = index.resume(agent.chain(), agent.kv_tokens)
        owned = agent.owned()
        hot = sum(index.pool_of(node).block_bytes for node in owned if node.block is not None)
        warm = 0 if tier is None else sum(tier.size_of(node) for node in owned if node.on_disk)
        where = "cold" if not found.path else "hot" if all(node.block is not None for node in found.nodes) else "warm"
    saved = 0 if tier is None else warm + tier.manifests.size((agent.tenant, agent.name))
    return Whereabouts(where, found.position, hot, saved)


def warm_up(histories: Histories, restorer: Restorer, agent: Agent) -> Warmed:
    """Read an agent's blocks into memory. A turn that goes on meanwhile is not disturbed."""
    index = histories.index
    with index.lock:
        chain, wanted = agent.chain(), agent.kv_tokens
        claimed = agent.owned()
        index.claim(claimed)
    receipt = Receipt(agent.name)
    kv = index.sequence(len(chain) * index.block_tokens)
    try:
        why = restorer.restore(kv, chain, wanted, receipt, always=True)
        cached = kv.length
        index.touch(chain[: len(kv.blocks)])
    finally:
        kv.close()
        index.release(reversed(claimed))
    now = whereabouts(histories, agent)
    if why is None and cached < agent.kv_tokens:
        why = index.why_lost(agent.owned(), now.tokens)
    return Warmed(
        now.tier,
        cached,
        receipt.restored_blocks,
        receipt.restored_bytes,
        receipt.restore_s,
        why.text if why is not None else "",
    )

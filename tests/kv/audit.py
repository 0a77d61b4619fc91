"""Everything that a store counts, counted again from its agents, its open turns and its files."""

from collections import Counter
from collections.abc import Sequence

from everwarm.kv.eviction import worth
from everwarm.kv.index.index import Superseded
from everwarm.kv.index.pool import GONE
from everwarm.kv.index.tree import Node
from everwarm.kv.store import AgentStore
from everwarm.kv.turn import Turn
from everwarm.kv.warm.blockstore import ObjectId
from kv import fake


def audit(store: AgentStore, turns: Sequence[Turn] = ()) -> None:
    """Raises AssertionError. Nobody else uses the store meanwhile; `turns` are those that are open."""
    main = [node for node in store.index.tree.nodes.values() if node.parent is not None]
    nodes = [*main, *(beside for node in main for beside in node.beside.values())]
    assert len(store.index.tree) == len(store.index.tree.nodes) + len(nodes) - len(main)
    _audit_tree(store, nodes, turns)
    _audit_agents(store, nodes, turns)
    _audit_memory(store, nodes, turns)
    if store.warm is not None and not store.read_only:
        _audit_disk(store, nodes)


def _audit_tree(store: AgentStore, nodes: list[Node], turns: Sequence[Turn]) -> None:
    claims = Counter(id(node) for turn in turns for node in turn._blocks.claimed)
    for node in nodes:
        assert node.parent is not None
        assert node.claims == claims[id(node)], f"{node.claims} claims, {claims[id(node)]} by open turns"
        assert store.index.tree.nodes[node.parent.key] is node.parent
        if node.main is None:
            assert sum(child is node for child in node.parent.children) == 1
        else:
            assert store.index.tree.nodes[node.key] is node.main
            assert node.main.beside[node.kind] is node
        assert node.children == sorted(node.children, key=lambda child: child.tokens)
        assert node.spoken_for, "nothing speaks for it"
    assert sum(node.writing for node in nodes) <= store.writer._pending


def _audit_agents(store: AgentStore, nodes: list[Node], turns: Sequence[Turn]) -> None:
    agents = list(store.agents.by_name.values())
    for what, owners in (
        ("named", [agent for agent in agents if not agent.anonymous]),
        ("anonymous", [agent for agent in agents if agent.anonymous]),
        ("pinned", [agent for agent in agents if agent.pinned]),
    ):
        counted = Counter((node.key, node.kind) for agent in owners for node in agent.owned())
        for one in _superseded(store):
            if {"named": not one.anonymous, "anonymous": one.anonymous, "pinned": one.pinned}[what]:
                counted.update((node.key, node.kind) for node in one.nodes)
        said = {(node.key, node.kind): getattr(node, what) for node in nodes if getattr(node, what)}
        assert said == dict(counted), what
    talking = Counter(id(turn.agent) for turn in turns if turn.agent is not None)
    for agent in agents:
        assert agent.waiting == talking[id(agent)], f"{agent.name}: {agent.waiting} turns"
        assert agent.talks == (talking[id(agent)] > 0)
        assert agent.generation or agent.unsaved or agent.waiting, f"{agent.name} has never said anything"
    for (tenant, group, digest), agent in store.agents.by_text.items():
        assert store.agents.by_name[tenant, agent.name] is agent
        assert (agent.tenant, agent.group, agent.text_digest) == (tenant, group, digest)


def _superseded(store: AgentStore) -> list[Superseded]:
    """What stored manifests need and their agents do not."""
    return [] if store.warm is None else [one for found in store.warm._superseded.values() for _, one in found]


def _audit_memory(store: AgentStore, nodes: list[Node], turns: Sequence[Turn]) -> None:
    index, hot = store.index, 0
    for kind, pool in index.pools.items():
        of_kind = [node for node in nodes if node.kind == kind]
        owners = Counter(node.block for node in of_kind if node.block is not None)
        assert max(owners.values(), default=1) == 1, "two nodes with one block"
        hot += len(owners)
        owners.update(node.block for node in of_kind if node.writing)
        for turn in turns:
            held = {"full": turn.kv.blocks, "window": turn.kv.windows, "state": [turn.kv.state]}[kind]
            owners.update(block for block in held if block != GONE)
        assert dict(owners) == pool._owners, "blocks whose owners are counted wrongly"
        assert pool.memory.in_use == pool.in_use
    assert index.bytes_in_use == sum(pool.in_use * pool.block_bytes for pool in index.pools.values())
    assert index.most_bytes is None or index.bytes_in_use <= index.most_bytes
    assert len(index.hot) == hot
    assert all(node in index.hot for node in nodes if node.block is not None)


def _audit_disk(store: AgentStore, nodes: list[Node]) -> None:
    directory, warm = fake.directory(store), fake.warm(store)
    blocks = {path.name: path.stat().st_size for path in directory.glob("blocks/*.safetensors") if path.name[0] != "."}
    manifests = [path for path in directory.glob("manifests/*.safetensors") if path.name[0] != "."]
    known = {ObjectId(node.key, node.kind) for node in nodes if node.on_disk}
    others = warm.garbage | warm.doomed
    assert not known & others, "a block that is in use would be deleted"
    assert not warm.garbage & warm.doomed
    counted = {found.blob("").name for found in known | others}
    assert counted == set(blocks), f"{len(counted - blocks.keys())} missing, {len(blocks.keys() - counted)} unknown"
    # A doomed manifest may be gone already, though not for sure: it counts until that is sure.
    doomed = warm.manifests.doomed.items()
    gone = sum(stored.size for who, stored in doomed if not fake.manifest_path(store, *who).exists())
    total = sum(blocks.values()) + sum(path.stat().st_size for path in manifests) + gone
    assert warm.bytes == total, f"{warm.bytes:,} bytes are counted, {total:,} are there"
    assert len(store.index.warm) == len(known)
    assert all(node in store.index.warm for node in nodes if node.on_disk)
    for node in nodes:
        assert store.index.hot.rank_of(node) in (None, store.index.rank_in_memory(node)), "in a queue of another rank"
        assert store.index.warm.rank_of(node) in (None, worth(node.named > 0, node.pinned > 0))

"""Taking in an exported agent.

Its blocks hang from a random salt of their own, so that the imported agent and its forks find them and nobody else.
What no checksum says is whether the KV is that of the tokens: only a file that is trusted shares its blocks with the
tenant's other agents.
"""

import secrets
from functools import partial
from pathlib import Path

import numpy as np

from everwarm.errors import AgentExistsError, StoreError
from everwarm.kernels.backend import FULL
from everwarm.kv.agent import Agent, check_name
from everwarm.kv.chain import token_bytes
from everwarm.kv.container import Array
from everwarm.kv.index.tree import Node
from everwarm.kv.manifest import Manifest, merged, text_digests
from everwarm.kv.store import AgentStore
from everwarm.kv.tools.exported import Content, Export, Moved, Progress, block_numbers, parts_of, quiet
from everwarm.kv.warm.tenants import DEFAULT_TENANT
from everwarm.kv.warm.tier import WarmTier


def import_agent(
    store: AgentStore,
    path: Path,
    name: str | None = None,
    tenant: str = "",
    *,
    trust: bool = False,
    progress: Progress | None = None,
) -> Moved:
    """Take in an agent, under another name if one is given. All of it or nothing; raises StoreError."""
    tier = store.warm
    if tier is None or store.read_only:
        raise StoreError(f"nothing can be imported: {store.read_only}")
    with Export(path) as export:
        export.check_model(store.ids)
        name = check_name(export.name if name is None else name, "agent")
        tenant = check_name(tenant or DEFAULT_TENANT, "tenant")
        needed, quota = _needed(tier, export), tier.shared.quota
        if needed > quota:
            raise StoreError(f"{path}: {needed:,} bytes, the quota is {quota:,}: give a larger --warm-quota")
        advice = "remove it, or give another name (--as)"
        if tier.manifests.refusal((tenant, name)):
            raise AgentExistsError(f"agent {name!r} exists already; {advice}")
        store.histories.look_up(name, tenant)
        agent = store.agents.claim_new(name, tenant, advice)
        try:
            content = export.read(progress or quiet)
            export.check_content(content, store.histories.vocab_size)
            salt = store.histories.tenant_salt(tenant) if trust else secrets.token_bytes(16)
            _Import(store, tier, agent, export, content, salt).run()
        except OSError as error:
            raise StoreError(f"{path}: can't be imported: {error.strerror or error}") from None
        finally:
            store.agents.leave(agent)
        return Moved(
            name, tenant, store.ids.name, str(path), export.tokens, export.kv_tokens, export.blocks, 0,
            export.size_bytes,
        )  # fmt: skip


def _needed(tier: WarmTier, export: Export) -> int:
    """Bytes of its blocks in the store."""
    ids, blocks = tier.blocks.ids, tier.blocks
    return sum(len(block_numbers(ids, kind, export.kv_tokens)) * blocks.object_bytes(kind) for kind in ids.layout.kinds)


class _Import:
    """Blocks, then the manifest; files are written by the writer's thread, from memory that nobody else needs."""

    def __init__(
        self, store: AgentStore, tier: WarmTier, agent: Agent, export: Export, content: Content, salt: bytes
    ) -> None:
        self._store, self._tier, self._agent = store, tier, agent
        self._export, self._content, self._salt = export, content, salt
        self._chain: list[Node] = []
        self._beside: list[Node] = []
        self._written: list[Node] = []

    def run(self) -> None:
        store, index = self._store, self._store.index
        size = 4 * index.block_tokens
        tokens = token_bytes(self._content.tokens)[: 4 * self._export.kv_tokens]
        node = store.histories.root(self._salt)
        try:
            for number in range(self._export.blocks):
                node = index.claim_child(node, tokens[number * size : (number + 1) * size])
                self._chain.append(node)
            with index.lock:
                self._beside = index.beside(self._chain, tokens, self._positions, make=True)
                index.claim(self._beside)
            self._write(FULL, self._chain)
            for kind in store.ids.layout.kinds:
                self._write(kind, [node for node in self._beside if node.kind == kind])
            store.histories.save(self._agent, self._manifest(), self._chain).result()
        except BaseException:
            store.histories.withdraw(self._agent)
            index.release([*self._beside, *reversed(self._chain)])
            store.writer.submit(lambda: self._tier.delete_unowned(self._written[::-1])).result()
            raise
        index.release([*self._beside, *reversed(self._chain)])

    @property
    def _positions(self) -> tuple[int, ...]:
        """An export holds what it takes to go on at its end."""
        apart = len(self._store.index.pools) > 1 and self._export.kv_tokens
        return (self._export.kv_tokens,) if apart else ()

    def _write(self, kind: str, nodes: list[Node]) -> None:
        block = np.empty(self._store.ids.layout.block_bytes(kind), np.uint8)
        parts = parts_of(block, self._store.ids, kind)
        for row, node in enumerate(nodes):
            self._export.block(kind, row, self._content, parts)
            self._store.writer.submit(partial(self._put, node, block)).result()

    def _put(self, node: Node, block: Array) -> None:
        """What is known already was computed here: it stays."""
        index = self._store.index
        if node.safe:
            return
        known = index.hold(node)
        try:
            with self._tier.shared.mutex:
                self._tier.put(node, block if known is None else index.pool_of(node).read(known))
            self._written.append(node)
        finally:
            if known is not None:
                index.drop(node, known)

    def _manifest(self) -> Manifest:
        content, ids, now = self._content, self._store.ids, self._store.histories.clock()
        return Manifest(
            tenant=self._agent.tenant,
            name=self._agent.name,
            generation=1,
            salt=self._salt.hex(),
            weights_id=ids.weights_id,
            numerics_id=ids.numerics_id,
            layout=ids.layout.digest,
            model=ids.name,
            kv_type=ids.kv_type,
            tokens=content.tokens,
            kv_tokens=self._export.kv_tokens,
            blocks=tuple(node.key for node in self._chain),
            positions=self._positions,
            runs=content.runs,
            messages=content.messages,
            text_digest=text_digests(merged(content.runs))[-1] if content.runs else "",
            anonymous=False,  # or a conversation without a name could go on from it unasked
            created=now,
            used=now,
        )

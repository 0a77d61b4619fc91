"""One turn of one agent: what it finds, what it computes, what it leaves behind."""

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from everwarm.errors import StoreError
from everwarm.kv.agent import Agent
from everwarm.kv.chain import token_bytes
from everwarm.kv.manifest import Manifest, merged, text_digests
from everwarm.kv.pool import BlockPool, SequenceKV
from everwarm.kv.receipt import Receipt
from everwarm.kv.restore import restore
from everwarm.kv.tree import Node, common_tokens
from everwarm.types import Run

if TYPE_CHECKING:
    from everwarm.kv.store import AgentStore


@dataclass(frozen=True, slots=True)
class History:
    """What an agent has heard and said until now."""

    tokens: bytes = b""  # big-endian
    kv_tokens: int = 0
    runs: tuple[Run, ...] = ()  # neighbouring texts merged
    messages: tuple[Any, ...] | None = None
    generation: int = 0
    lost: str = ""  # why it can't be read

    @staticmethod
    def of(manifest: Manifest) -> "History":
        return History(
            token_bytes(manifest.tokens),
            manifest.kv_tokens,
            merged(manifest.runs),
            manifest.messages,
            manifest.generation,
        )

    @property
    def ids(self) -> list[int]:
        ids: list[int] = np.frombuffer(self.tokens, ">u4").tolist()
        return ids


class Alone:
    """A turn of nobody: nothing is looked up, nothing is kept."""

    def __init__(self, pool: BlockPool, capacity: int) -> None:
        self.kv = SequenceKV(pool, capacity)

    def append(self, tokens: Sequence[int]) -> None:
        """Nobody will ask for them."""

    def seal_full(self, wait: bool = True) -> None:
        """Blocks go with the turn."""

    def computed(self, tokens: int, seconds: float) -> None:
        """Nothing is weighed against it."""

    def suspend(self) -> None:
        """Give up the memory: everything is computed again."""
        self.kv.close()

    def resume(self) -> None:
        """Nothing was kept."""

    def __enter__(self) -> "Alone":
        return self

    def __exit__(self, *error: object) -> None:
        self.kv.close()


class Turn:
    """Owned by one request from `AgentStore.open_turn` to `release`."""

    def __init__(self, store: "AgentStore", agent: "Agent | None", tenant: str, capacity: int, group: str = "") -> None:
        self.store = store
        self.group = group  # of a conversation that has no name of its own
        self.agent = agent  # None: a conversation without a name, until its content gives it one
        self.tenant = tenant
        self.history = History() if agent is None else store.history(agent)
        self.kv = SequenceKV(store.pool, capacity)
        self.receipt = Receipt(agent.name if agent else "", exact=store.exact)
        self._tokens = b""  # those of the prompt and, as they come, of the answer; big-endian
        self._salt = b""
        self._sealed: list[Node] = []  # full blocks
        self._claimed: list[Node] = []
        self._root: Node | None = None

    def adopt(self, agent: "Agent") -> None:
        """A conversation without a name goes on from this one, whose turn is owned now."""
        assert self.agent is None
        self.agent = agent
        self.history = self.store.history(agent)
        self.receipt.agent = agent.name

    def acquire(self, tokens: Sequence[int], diverged_at_char: int | None = None) -> Receipt:
        """Find the longest known prefix and make it part of `kv`. At least the last token is left to be computed."""
        store, receipt = self.store, self.receipt
        started = time.perf_counter()
        self._tokens = token_bytes(tokens)
        receipt.prompt_tokens = len(tokens)
        receipt.diverged_at_char = diverged_at_char
        receipt.tokens_digest = hashlib.blake2b(self._tokens, digest_size=16).hexdigest()
        matched, nodes = self._find()
        receipt.lookup_s = time.perf_counter() - started
        why = self._take(matched, nodes, receipt)
        receipt.cached_tokens = self.kv.length
        if not self.kv.length:
            receipt.tier = "cold"
        self._explain(why, whole_prompt=matched == len(tokens))
        store.count_lookup(receipt)
        return receipt

    def suspend(self) -> None:
        """Give up the memory. What was computed is known, on its way to disk, and found again by `resume`."""
        self._seal_rest(wait=False)
        self.kv.close()
        self._sealed = []

    def resume(self) -> None:
        """Take up what can be found of the tokens until now."""
        matched, nodes = self._find()
        self._take(matched, nodes, Receipt(self.receipt.agent))

    def _find(self) -> tuple[int, list[Node]]:
        """How many tokens are known, and the blocks of them that a turn can use: all but the last token."""
        store = self.store
        salts = store.salts(self.tenant, self.agent)
        with store.lock:
            found: list[tuple[int, bytes, Node, list[Node], Node | None]] = []
            for salt in salts:
                root = store.root(salt)
                path, partial, shared = store.tree.walk(root, self._tokens)
                found.append((len(path) * store.pool.block_tokens + shared, salt, root, path, partial))
            matched, self._salt, self._root, path, partial = max(found, key=lambda one: one[0])
            wanted = min(matched, len(self._tokens) // 4 - 1)
            nodes = [*path, *([partial] if partial else [])][: -(-wanted // store.pool.block_tokens)]
            self._claim(nodes)
        return matched, nodes

    def _take(self, matched: int, nodes: list[Node], receipt: Receipt) -> str:
        """Make these blocks the sequence's. Returns why not all."""
        store, size = self.store, self.store.pool.block_tokens
        usable, why = restore(store, self.kv, nodes, receipt)
        self.kv.length = min(matched, len(self._tokens) // 4 - 1, usable * size)
        self.kv.truncate(self.kv.length)
        self._sealed = nodes[: self.kv.length // size]
        with store.lock:
            store.hot.touch(node for node in reversed(nodes[:usable]) if node.block is not None)
            store.warm.touch(nodes[:usable])
        return why

    def append(self, tokens: Sequence[int]) -> None:
        """These tokens follow; `kv` need not have them yet."""
        self._tokens += token_bytes(tokens)

    def computed(self, tokens: int, seconds: float) -> None:
        """So fast is computing: to be weighed against reading."""
        self.store.compute_speed.measured(tokens, seconds)

    def seal_full(self, wait: bool = True) -> None:
        """Hand over the blocks that have been filled since. Without `wait`, what the writer can't take yet is left to
        the commit.
        """
        size = self.store.pool.block_tokens
        while (len(self._sealed) + 1) * size <= self.kv.length:
            node = self._seal(len(self._sealed) * size, (len(self._sealed) + 1) * size, wait)
            assert node is not None, "a full block was computed here, or is known"
            self._sealed.append(node)

    def commit(
        self, runs: tuple[Run, ...], messages: tuple[Any, ...] | None = None, *, wait: bool | None = None
    ) -> Receipt:
        """The history is now all tokens that were given, spelt by `runs`. With durability `turn` this returns when it
        is safe; `receipt.committed` and `receipt.error` say whether it is.
        """
        store, receipt = self.store, self.receipt
        started = time.perf_counter()
        chain = self._seal_rest(wait=True)
        agent = self.agent or self._named_by_content()
        now = store.clock()
        manifest = Manifest(
            tenant=self.tenant,
            name=agent.name,
            generation=agent.generation + 1,
            salt=self._salt.hex(),
            weights_id=store.ids.weights_id,
            numerics_id=store.ids.numerics_id,
            layout=store.ids.layout.digest,
            model=store.ids.name,
            kv_type=store.ids.kv_type,
            tokens=np.frombuffer(self._tokens, ">u4").astype(np.uint32),
            kv_tokens=chain[-1].end if chain else 0,
            blocks=tuple(node.key for node in chain),
            runs=runs,
            messages=messages,
            text_digest=text_digests(merged(runs))[-1] if runs else "",
            anonymous=agent.anonymous,
            group=agent.group,
            pinned=agent.pinned,
            created=agent.created,
            used=now,
        )
        self._keep_claims(chain)  # what it began with may go, if nobody else wants it
        saving = store.save(agent, manifest, chain)
        if wait if wait is not None else store.durability == "turn":
            self._settle(saving, started)
        else:
            saving.add_done_callback(lambda done: self._settle(done, started))
        store.forget_old()
        return receipt

    def release(self) -> None:
        """Give back the sequence's blocks and the agent's turn. What was sealed stays known."""
        self.kv.close()
        self._keep_claims([])
        agent, self.agent = self.agent, None
        if agent is not None:
            self.store.end_turn(agent)

    def __enter__(self) -> "Turn":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _seal(self, begin: int, end: int, wait: bool) -> Node | None:
        """The node of a block that will not be written any more; None if it is the beginning of another one."""
        number = begin // self.store.pool.block_tokens
        assert self._root is not None
        parent = self._sealed[-1] if self._sealed else self._root
        sealed = self.store.seal(parent, self._tokens[4 * begin : 4 * end], self.kv.blocks[number])
        if sealed is None:
            return None
        node, self.kv.blocks[number] = sealed
        self._claim([node])
        self.store.save_block(node, wait)
        return node

    def _seal_rest(self, wait: bool) -> list[Node]:
        """Seal everything that was computed, the partial block at the end as well; all of the chain."""
        self.seal_full(wait)
        covered = min(self.kv.length, len(self._tokens) // 4)
        chain = list(self._sealed)
        if covered > len(chain) * self.store.pool.block_tokens:
            end = self._seal(len(chain) * self.store.pool.block_tokens, covered, wait)
            chain += [end] if end is not None else []
        return chain

    def _claim(self, nodes: list[Node]) -> None:
        with self.store.lock:
            for node in nodes:
                node.claims += 1
            self._claimed += nodes

    def _keep_claims(self, nodes: list[Node]) -> None:
        kept = set(map(id, nodes))
        with self.store.lock:
            claimed, self._claimed = self._claimed, []
            for node in claimed:
                if id(node) in kept:
                    self._claimed.append(node)
                else:
                    node.claims -= 1
                    self.store.tree.forget(node)

    def _named_by_content(self) -> "Agent":
        digest = hashlib.blake2b(self._tokens, digest_size=8, key=self._salt).hexdigest()
        self.agent = self.store.own_new(f"{self.group or 'anonymous'}-{digest}", self.tenant, self.group)
        self.receipt.agent = self.agent.name
        return self.agent

    def _settle(self, saving: "Future[int]", started: float) -> None:
        try:
            self.receipt.saved_bytes = saving.result()
            self.receipt.committed = True
        except StoreError as error:
            self.receipt.committed, self.receipt.error = False, str(error)
        self.receipt.save_s = time.perf_counter() - started

    def _explain(self, why: str, whole_prompt: bool) -> None:
        """Say in the receipt how the prompt and the history fit, and what kept more from being reused."""
        receipt, history = self.receipt, self.history
        common = common_tokens(history.tokens, self._tokens)
        known = len(history.tokens) // 4
        if known and common < min(known, receipt.prompt_tokens):
            receipt.diverged_at_token = common
        if whole_prompt and receipt.cached_tokens == receipt.prompt_tokens - 1:
            receipt.match, receipt.reason = "exact", "exact"
        elif known and receipt.diverged_at_token is not None:
            receipt.match = "diverged"
            receipt.reason = f"diverged at token {common}"
            if receipt.diverged_at_char is not None:
                receipt.reason += f", character {receipt.diverged_at_char}"
        elif known:
            receipt.match, receipt.reason = "extended", "extended"
        elif receipt.cached_tokens:
            receipt.match, receipt.reason = "shared", "prefix of another history"
        else:
            receipt.reason = self.store.why_unknown(self.tenant, self.agent)
        if not receipt.cached_tokens and known:
            receipt.match = "none"
        expected = min(common, history.kv_tokens, receipt.prompt_tokens - 1)
        lost = why or history.lost or (self.store.why_lost(self.agent, receipt.cached_tokens) if known else "")
        if (receipt.cached_tokens < expected and lost) or history.lost:
            receipt.reason = lost

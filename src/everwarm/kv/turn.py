"""One turn of one agent: what it finds, what it computes, what it leaves behind."""

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from everwarm.errors import StoreError, TurnLostError
from everwarm.kv.agent import Agent
from everwarm.kv.answers import Answered, KnownAnswers
from everwarm.kv.chain import token_bytes
from everwarm.kv.expiry import Expiry
from everwarm.kv.explanation import Asked, count_shared, explain, last_turn
from everwarm.kv.histories import Histories, History
from everwarm.kv.index.index import Index
from everwarm.kv.index.pool import GONE
from everwarm.kv.index.tree import Node, is_hot
from everwarm.kv.manifest import Manifest, merged, text_digests
from everwarm.kv.marks import Marks
from everwarm.kv.receipt import Receipt, Why
from everwarm.kv.turn_blocks import TurnBlocks
from everwarm.kv.warm.restore import Restorer
from everwarm.types import AnswerPlace, Run


@dataclass(frozen=True, slots=True)
class TurnContext:
    """What every turn of a store works with."""

    histories: Histories
    restorer: Restorer
    expiry: Expiry
    exact: bool
    durability: str
    marks: Marks

    @property
    def index(self) -> Index:
        return self.histories.index


class Alone:
    """A turn of nobody: nothing is looked up, nothing is kept."""

    def __init__(self, index: Index, capacity: int) -> None:
        self.kv = index.sequence(capacity)

    def append(self, tokens: Sequence[int]) -> None:
        """Nobody will ask for them."""

    stop: int | None = None

    def seal_full(self, wait: bool = True) -> None:
        """Blocks go with the turn."""

    def computed(self, tokens: int, seconds: float) -> None:
        """Nothing is weighed against it."""

    def next_block(self) -> None:
        """Nobody else computes for it."""

    def catch_up(self) -> None:
        """Nothing is looked up."""

    def suspend(self) -> None:
        """Give up the memory: everything is computed again."""
        self.kv.close()

    def resume(self) -> None:
        """Nothing was kept."""

    def __enter__(self) -> "Alone":
        return self

    def __exit__(self, *error: object) -> None:
        self.kv.close()


ENOUGH_TO_MEASURE = 64
"""Tokens of a prompt from which the speed of computing is told: fewer take longer each."""


class Turn:
    """Owned by one request from `AgentStore.open_turn` to `release`."""

    def __init__(
        self,
        context: TurnContext,
        agent: Agent | None,
        tenant: str,
        capacity: int,
        group: str = "",
        parent: Agent | None = None,
    ) -> None:
        """`parent`: whose history a new agent goes on from. It stays as it is."""
        self._context = context
        self._index, self._histories = context.index, context.histories
        self.group = group  # of a conversation that has no name of its own
        self.agent = agent  # None: a conversation without a name, until its content gives it one
        self.tenant = tenant
        self._parent = parent
        origin = parent or agent
        self.history = History() if origin is None else self._histories.read(origin)
        self.kv = self._index.sequence(capacity)
        self._blocks = TurnBlocks(self._histories, context.marks, self.kv)
        self.receipt = Receipt(agent.name if agent else "", exact=context.exact)
        self._salt = b""
        self._answers = KnownAnswers(self._histories)
        self._reached = 0  # tokens whose KV it had before it was suspended
        self._committed = False
        self._prefilled, self._prefill_s = 0, 0.0  # tokens of the prompt that were computed alone, and how long it took

    def continue_branch(self, digests: list[str]) -> None:
        """Let a conversation without a name go on from one whose text is a beginning of its own, the longest first.
        `digests` are those of its beginnings, the shortest first. One that is being continued already is left alone:
        this one forks.
        """
        assert self.agent is None
        agent = self._histories.agents.claim_branch(self.tenant, self.group, digests)
        if agent is not None:
            self._histories.begin(agent)
            if agent.text_digest not in digests:  # another replica has continued it meanwhile
                self._histories.end(agent)
                self._histories.agents.leave(agent)
                return
            self.agent = agent
            self.history = self._histories.read(agent)
            self.receipt.agent = agent.name

    @property
    def may_know_answers(self) -> bool:
        """Whether `answers_behind` may find any."""
        if self._parent is None and self.agent is None:
            return self._histories.agents.has_answers
        return bool(self.history.answers)

    def answers_behind(self, digest: str) -> Iterator[Answered]:
        """Answers that were given behind a text with this digest: of this history or, for a conversation that has no
        name and no history yet, of its group.
        """
        origin = self._parent or self.agent
        if origin is not None:
            yield from self._answers.of(origin, self.history).get(digest, ())
            return
        for agent in self._histories.agents.answered(self.tenant, self.group, digest):
            yield from self._answers.of(agent).get(digest, ())

    def branch_off(self, answered: Answered) -> None:
        """A conversation without a name goes on from the history of another one, which stays as it is."""
        assert self.agent is None
        self._parent, self.history = answered.agent, answered.history

    def acquire(self, tokens: Sequence[int], diverged_at_char: int | None = None) -> Receipt:
        """Find the longest known prefix and make it part of `kv`. At least the last token is left to be computed."""
        receipt = self.receipt
        started = time.perf_counter()
        receipt.prompt_tokens = len(tokens)
        receipt.diverged_at_char = diverged_at_char
        said, rule = token_bytes(tokens), self._context.marks
        receipt.tokens_digest = hashlib.blake2b(said, digest_size=16).hexdigest()
        self._blocks.begin(said, {*rule.positions(said), rule.last(len(tokens))} if rule.every else ())
        matched, nodes = self._find()
        receipt.lookup_s = time.perf_counter() - started
        why = self._take(matched, nodes, receipt)
        receipt.cached_tokens = self.kv.length
        receipt.known_tokens = min(matched, len(tokens) - 1)
        token_s = self._token_s or self._context.restorer.compute_speed.seconds
        receipt.computing_s = None if token_s is None else receipt.cached_tokens * token_s
        if receipt.hardly_reused:
            receipt.tier = "cold"
        origin, whole = self._parent or self.agent, matched == len(tokens)
        asked = Asked(self._blocks.tokens, self.tenant, self.agent, origin, self.history, whole)
        explain(receipt, asked, why, self._histories)
        events = self._index.counts.events
        events[f"lookups_{receipt.tier}"] += 1
        events["cached_tokens"] += receipt.cached_tokens
        events["prompt_tokens"] += receipt.prompt_tokens
        return receipt

    def begin_ahead(self, tokens: Sequence[int]) -> bool:
        """Make the blocks of these tokens that are in memory part of `kv`, with memory for the others: only if that
        takes nothing from anybody, in memory or on disk. Whether it did; not if all is known already.
        """
        index = self._index
        self._blocks.begin(token_bytes(tokens), (self._context.marks.last(len(tokens)),))
        with index.lock:
            matched, nodes = self._find()
            missing = index.bytes_for(len(tokens)) - len(nodes) * index.block_bytes
            tier = self._histories.tier
            spare = tier is None or missing <= tier.spare_bytes
            if matched >= len(tokens) or not spare or not index.has_free(missing):
                return False
            wanted = min(matched, len(tokens) - 1)
            if index.resume(nodes, wanted, is_hot).position < wanted:
                return False
            self._take(matched, nodes, Receipt(""))
            self.kv.reserve(len(tokens), wait=False)
        return True

    def suspend(self) -> None:
        """Give up the memory. What was computed is known, on its way to disk, and found again by `resume`."""
        self._reached = max(self._reached, self.kv.length)
        self._blocks.seal_rest(wait=False)
        self._blocks.give_up_memory()

    def resume(self) -> None:
        """Take up what can be found of the tokens until now."""
        matched, nodes = self._find()
        self._take(matched, nodes, Receipt(self.receipt.agent))

    def next_block(self) -> object | None:
        """The block that is computed next, if `catch_up` could take it over: equal for all turns that compute the same
        one. None if it will not be full.
        """
        mine, tokens = self._blocks, self._blocks.tokens
        if self._index.states is not None:  # what others have computed can be taken over at the next stop
            stop = self.stop
            return None if stop is None or 4 * stop >= len(tokens) else (id(mine.root), tokens[: 4 * stop])
        begin, end = mine.end_of_full, mine.end_of_full + self._index.block_tokens
        return None if 4 * end >= len(tokens) else (id(mine.parent), tokens[4 * begin : 4 * end])

    @property
    def stop(self) -> int | None:
        """The position that the next step must not go beyond: a state has to be kept there. None: there is none."""
        return self._blocks.stop

    def catch_up(self) -> None:
        """Take over the blocks that come next here and that other turns have sealed meanwhile: they are not computed
        again. At least the last token is left to be computed.
        """
        index, mine, begin = self._index, self._blocks, max(self.kv.length, self._reached)
        with index.lock:
            nodes = index.hot_path(mine.parent, mine.tokens[4 * mine.end_of_full : -4])
            if not nodes:
                return
            path = [*mine.full, *nodes]
            plan = index.resume(path, path[-1].end, is_hot)
            nodes = plan.path[len(mine.full) :]
            if plan.position <= self.kv.length or not nodes or plan.position % index.block_tokens:
                return
            mine.claim(nodes)
            windows = index.hold_all(list(plan.windows.values()))
            state = None if plan.state is None else index.hold(plan.state)
            self.kv.go_on_with(
                list(index.hold_all(nodes).values()),
                dict(zip(plan.windows, windows.values(), strict=True)),
                GONE if state is None else state,
            )
        mine.follow(mine.root, [*mine.full, *nodes])
        index.touch(nodes)
        shared = min(self.kv.length, self.receipt.prompt_tokens) - begin
        if shared > 0:
            count_shared(self.receipt, shared)
            index.counts.events["cached_tokens"] += shared

    def _find(self) -> tuple[int, list[Node]]:
        """How many tokens are known, and the blocks of them that a turn can use: all but the last token."""
        index, size, tokens = self._index, self._index.block_tokens, self._blocks.tokens
        salts = self._histories.salts(self.tenant, self._parent or self.agent)
        with index.lock:
            found: list[tuple[int, bytes, Node, list[Node], Node | None]] = []
            for salt in salts:
                root = self._histories.root(salt)
                path, partial, shared = index.walk(root, tokens)
                found.append((len(path) * size + shared, salt, root, path, partial))
            matched, self._salt, root, path, partial = max(found, key=lambda match: match[0])
            self._blocks.follow(root, self._blocks.full)
            wanted = min(matched, len(tokens) // 4 - 1)
            nodes = [*path, *([partial] if partial else [])][: -(-wanted // size)]
            self._blocks.claim(nodes)
        return matched, nodes

    def _take(self, matched: int, nodes: list[Node], receipt: Receipt) -> Why | None:
        """Make these blocks the sequence's. Returns why not all."""
        wanted = min(matched, len(self._blocks.tokens) // 4 - 1)
        why = self._context.restorer.restore(self.kv, nodes, wanted, receipt)
        self._blocks.follow(self._blocks.root, nodes[: self.kv.length // self._index.block_tokens])
        self._index.touch(nodes[: len(self.kv.blocks)])
        return why

    def append(self, tokens: Sequence[int]) -> None:
        """These tokens follow; `kv` need not have them yet."""
        self._blocks.append(token_bytes(tokens))

    def computed(self, tokens: int, seconds: float) -> None:
        """So fast is computing: to be weighed against reading."""
        self._prefilled += tokens
        self._prefill_s += seconds
        self._context.restorer.compute_speed.measured(tokens, seconds)

    def seal_full(self, wait: bool = True) -> None:
        """Hand over the blocks that have been filled since. Without `wait`, what the writer can't take yet is left to
        the commit.
        """
        self._blocks.seal_full(wait)

    def commit(
        self,
        runs: tuple[Run, ...],
        messages: tuple[Any, ...] | None = None,
        *,
        wait: bool | None = None,
        final: bool = False,
        record: Mapping[str, Any] | None = None,
        answers: tuple[AnswerPlace, ...] = (),
    ) -> Receipt:
        """The history is now all tokens that were given, spelt by `runs`. With durability `turn` this returns when it
        is safe; `receipt.committed` and `receipt.error` say whether it is. `final`: the agent is a point of a history,
        which never changes and is kept like a conversation without a name; `record` is kept with it. `answers`: what of
        it the model has said. Raises TurnLostError if another process has taken over the turn meanwhile.
        """
        histories, ids, mine = self._histories, self._histories.ids, self._blocks
        started = time.perf_counter()
        chain = mine.seal_rest(wait=True)
        self._committed = True
        positions = mine.positions(chain, self.history, self.receipt.prompt_tokens)
        agent = self.agent or self._named_by_content()
        manifest = Manifest(
            tenant=self.tenant,
            name=agent.name,
            generation=agent.generation + 1,
            salt=self._salt.hex(),
            weights_id=ids.weights_id,
            numerics_id=ids.numerics_id,
            layout=ids.layout.digest,
            model=ids.name,
            kv_type=ids.kv_type,
            tokens=np.frombuffer(mine.tokens, ">u4").astype(np.uint32),
            kv_tokens=chain[-1].end if chain else 0,
            blocks=tuple(node.key for node in chain),
            positions=positions,
            runs=runs,
            messages=messages,
            text_digest=text_digests(merged(runs))[-1] if runs else "",
            anonymous=agent.anonymous or final,
            group=agent.group,
            pinned=agent.pinned,
            final=final,
            record=record,
            answers=answers,
            last=last_turn(self.receipt, self.history, forked=self._parent is not None, token_s=self._token_s),
            created=agent.created,
            used=histories.clock(),
        )
        # What it began with may go, if nobody else wants it.
        beside = [node for node in mine.claimed if node.main is not None]
        mine.keep_claims([*chain, *self._index.beside(chain, mine.tokens, positions)])
        saving = histories.save(agent, manifest, chain)
        histories.drop_unowned(beside)
        if wait if wait is not None else self._context.durability == "turn":
            self._settle(saving, started)
            if isinstance(lost := saving.exception(), TurnLostError):
                raise lost
        else:
            saving.add_done_callback(lambda done: self._settle(done, started))
        self._context.expiry.look()
        return self.receipt

    def release(self) -> None:
        """Give back the sequence's blocks and the agent's turn. What was sealed stays known."""
        self.kv.close()
        self._blocks.keep_claims([])
        if self._committed:
            self._blocks.drop_unseen()
        agent, self.agent = self.agent, None
        if agent is not None:
            self._histories.end(agent)
            self._histories.agents.leave(agent)

    def __enter__(self) -> "Turn":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _named_by_content(self) -> Agent:
        digest = hashlib.blake2b(self._blocks.tokens, digest_size=8, key=self._salt).hexdigest()
        name = f"{self.group or 'anonymous'}-{digest}"
        self.agent = self._histories.agents.claim_unnamed(name, self.tenant, self.group)
        self._histories.begin(self.agent)
        self.receipt.agent = self.agent.name
        return self.agent

    @property
    def _token_s(self) -> float | None:
        """Seconds that computing a token of the prompt takes: as measured now, or when this history was computed."""
        if self._prefilled >= ENOUGH_TO_MEASURE:
            return self._prefill_s / self._prefilled
        return None if self.history.last is None else self.history.last.token_s

    def _settle(self, saving: "Future[int]", started: float) -> None:
        try:
            self.receipt.saved_bytes = saving.result()
            self.receipt.committed = True
        except StoreError as error:
            self.receipt.committed, self.receipt.error = False, str(error)
        self.receipt.save_s = time.perf_counter() - started

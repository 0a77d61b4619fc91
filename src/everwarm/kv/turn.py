"""One turn of one agent: what it finds, what it computes, what it leaves behind."""

import bisect
import hashlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from everwarm.errors import StoreError, TurnLostError
from everwarm.kernels.backend import STATE, WINDOW
from everwarm.kv.agent import Agent
from everwarm.kv.chain import token_bytes
from everwarm.kv.expiry import Expiry
from everwarm.kv.histories import Histories, History
from everwarm.kv.index.index import Index
from everwarm.kv.index.pool import GONE
from everwarm.kv.index.tree import Node, common_tokens, is_hot
from everwarm.kv.last_turn import LastTurn, Left, Reuse
from everwarm.kv.manifest import Manifest, merged, text_digests
from everwarm.kv.marks import Marks
from everwarm.kv.receipt import Cause, Receipt, Why
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


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer that was given once."""

    agent: Agent
    history: History
    place: AnswerPlace


def answers_by_digest(agent: Agent, history: History) -> dict[str, list[Answered]]:
    """By the digests of the texts that they follow."""
    found = defaultdict[str, list[Answered]](list)
    for place in history.answers:
        found[place.digest].append(Answered(agent, history, place))
    return found


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
        self.receipt = Receipt(agent.name if agent else "", exact=context.exact)
        self._tokens = b""  # those of the prompt and, as they come, of the answer; big-endian
        self._salt = b""
        self._sealed: list[Node] = []  # full blocks
        self._claimed: list[Node] = []
        self._root: Node | None = None
        self._answered: dict[int, dict[str, list[Answered]]] = {}  # by agents that were looked at
        self._reached = 0  # tokens whose KV it had before it was suspended
        self._marks: list[int] = []  # positions of the prompt whose windows are kept, in order
        self._windows: dict[int, Node] = {}  # what was sealed of windows, by number of block
        self._committed = False

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
            yield from self._answers_of(origin, self.history).get(digest, ())
            return
        for agent in self._histories.agents.answered(self.tenant, self.group, digest):
            yield from self._answers_of(agent).get(digest, ())

    def _answers_of(self, agent: Agent, history: History | None = None) -> dict[str, list[Answered]]:
        """By the digests of the texts that they follow."""
        if id(agent) not in self._answered:
            history = history or self._histories.peek(agent)
            self._answered[id(agent)] = {} if history is None else answers_by_digest(agent, history)
        return self._answered[id(agent)]

    def branch_off(self, answered: Answered) -> None:
        """A conversation without a name goes on from the history of another one, which stays as it is."""
        assert self.agent is None
        self._parent, self.history = answered.agent, answered.history

    def acquire(self, tokens: Sequence[int], diverged_at_char: int | None = None) -> Receipt:
        """Find the longest known prefix and make it part of `kv`. At least the last token is left to be computed."""
        receipt = self.receipt
        started = time.perf_counter()
        self._tokens = token_bytes(tokens)
        receipt.prompt_tokens = len(tokens)
        receipt.diverged_at_char = diverged_at_char
        receipt.tokens_digest = hashlib.blake2b(self._tokens, digest_size=16).hexdigest()
        marks = self._context.marks
        if marks.every:
            self._marks = sorted({*marks.positions(self._tokens), marks.last(len(tokens))})
        matched, nodes = self._find()
        receipt.lookup_s = time.perf_counter() - started
        why = self._take(matched, nodes, receipt)
        receipt.cached_tokens = self.kv.length
        receipt.known_tokens = min(matched, len(tokens) - 1)
        if receipt.hardly_reused:
            receipt.tier = "cold"
        self._explain(why, whole_prompt=matched == len(tokens))
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
        self._tokens = token_bytes(tokens)
        self._marks = [self._context.marks.last(len(tokens))]
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
        self._seal_rest(wait=False)
        self.kv.close()
        self._sealed, self._windows = [], {}

    def resume(self) -> None:
        """Take up what can be found of the tokens until now."""
        matched, nodes = self._find()
        self._take(matched, nodes, Receipt(self.receipt.agent))

    def next_block(self) -> object | None:
        """The block that is computed next, if `catch_up` could take it over: equal for all turns that compute the same
        one. None if it will not be full.
        """
        if self._index.states is not None:  # what others have computed can be taken over at the next stop
            stop = self.stop
            return None if stop is None or 4 * stop >= len(self._tokens) else (id(self._root), self._tokens[: 4 * stop])
        begin = 4 * len(self._sealed) * self._index.block_tokens
        end = begin + 4 * self._index.block_tokens
        if end >= len(self._tokens):
            return None
        return id(self._sealed[-1] if self._sealed else self._root), self._tokens[begin:end]

    @property
    def stop(self) -> int | None:
        """The position that the next step must not go beyond: a state has to be kept there. None: there is none."""
        if self._index.states is None:
            return None
        at, every = self.kv.length, self._context.marks.every
        following = bisect.bisect_right(self._marks, at)
        return min([*self._marks[following : following + 1], (at // every + 1) * every])

    def catch_up(self) -> None:
        """Take over the blocks that come next here and that other turns have sealed meanwhile: they are not computed
        again. At least the last token is left to be computed.
        """
        assert self._root is not None
        index, begin = self._index, max(self.kv.length, self._reached)
        known = len(self._sealed) * index.block_tokens
        with index.lock:
            parent = self._sealed[-1] if self._sealed else self._root
            nodes = index.hot_path(parent, self._tokens[4 * known : -4])
            if not nodes:
                return
            path = [*self._sealed, *nodes]
            plan = index.resume(path, path[-1].end, is_hot)
            nodes = plan.path[len(self._sealed) :]
            if plan.position <= self.kv.length or not nodes or plan.position % index.block_tokens:
                return
            self._claim(nodes)
            windows = index.hold_all(list(plan.windows.values()))
            state = None if plan.state is None else index.hold(plan.state)
            self.kv.go_on_with(
                list(index.hold_all(nodes).values()),
                dict(zip(plan.windows, windows.values(), strict=True)),
                GONE if state is None else state,
            )
        self._sealed += nodes
        index.touch(nodes)
        self._count_shared(min(self.kv.length, self.receipt.prompt_tokens) - begin)

    def _count_shared(self, tokens: int) -> None:
        """So many tokens of the prompt were computed by another turn while this one was on its way."""
        receipt = self.receipt
        if tokens <= 0:
            return
        receipt.cached_tokens += tokens
        self._index.counts.events["cached_tokens"] += tokens
        if receipt.tier == "cold" and not receipt.hardly_reused:
            receipt.tier = "hot"
        if receipt.match == "none":
            receipt.match = "shared"
            receipt.explain(Why(Cause.SHARED, "computed for another request at the same time"))

    def _find(self) -> tuple[int, list[Node]]:
        """How many tokens are known, and the blocks of them that a turn can use: all but the last token."""
        index, size = self._index, self._index.block_tokens
        salts = self._histories.salts(self.tenant, self._parent or self.agent)
        with index.lock:
            found: list[tuple[int, bytes, Node, list[Node], Node | None]] = []
            for salt in salts:
                root = self._histories.root(salt)
                path, partial, shared = index.walk(root, self._tokens)
                found.append((len(path) * size + shared, salt, root, path, partial))
            matched, self._salt, self._root, path, partial = max(found, key=lambda match: match[0])
            wanted = min(matched, len(self._tokens) // 4 - 1)
            nodes = [*path, *([partial] if partial else [])][: -(-wanted // size)]
            self._claim(nodes)
        return matched, nodes

    def _take(self, matched: int, nodes: list[Node], receipt: Receipt) -> Why | None:
        """Make these blocks the sequence's. Returns why not all."""
        size = self._index.block_tokens
        wanted = min(matched, len(self._tokens) // 4 - 1)
        why = self._context.restorer.restore(self.kv, nodes, wanted, receipt)
        self._sealed = nodes[: self.kv.length // size]
        self._index.touch(nodes[: len(self.kv.blocks)])
        return why

    def append(self, tokens: Sequence[int]) -> None:
        """These tokens follow; `kv` need not have them yet."""
        self._tokens += token_bytes(tokens)

    def computed(self, tokens: int, seconds: float) -> None:
        """So fast is computing: to be weighed against reading."""
        self._context.restorer.compute_speed.measured(tokens, seconds)

    def seal_full(self, wait: bool = True) -> None:
        """Hand over the blocks that have been filled since. Without `wait`, what the writer can't take yet is left to
        the commit.
        """
        size = self._index.block_tokens
        while (len(self._sealed) + 1) * size <= self.kv.length:
            node = self._seal(len(self._sealed) * size, (len(self._sealed) + 1) * size, wait)
            assert node is not None, "a full block was computed here, or is known"
            self._sealed.append(node)
        if self._index.states is not None and self._is_mark(self.kv.length):
            self._keep_state(self._sealed[-1], wait)
        self._drop_unseen()

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
        histories, ids = self._histories, self._histories.ids
        started = time.perf_counter()
        chain = self._seal_rest(wait=True)
        self._committed = True
        positions = self._positions(chain)
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
            tokens=np.frombuffer(self._tokens, ">u4").astype(np.uint32),
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
            last=self._last_turn(),
            created=agent.created,
            used=histories.clock(),
        )
        # What it began with may go, if nobody else wants it.
        beside = [node for node in self._claimed if node.main is not None]
        self._keep_claims([*chain, *self._index.beside(chain, self._tokens, positions)])
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
        self._keep_claims([])
        if self._committed:
            self._drop_unseen()
        agent, self.agent = self.agent, None
        if agent is not None:
            self._histories.end(agent)
            self._histories.agents.leave(agent)

    def __enter__(self) -> "Turn":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _seal(self, begin: int, end: int, wait: bool) -> Node | None:
        """The node of a block that will not be written any more; None if it is the beginning of another one."""
        number = begin // self._index.block_tokens
        assert self._root is not None
        parent = self._sealed[-1] if self._sealed else self._root
        sealed = self._index.seal(parent, self._tokens[4 * begin : 4 * end], self.kv.blocks[number])
        if sealed is None:
            return None
        node, self.kv.blocks[number] = sealed
        self._claim([node])
        self._histories.save_block(node, wait)
        if (windows := self._index.windows) is not None:
            self._seal_window(node, number)
            if any(number in windows.numbers(mark) for mark in self._marks_from(begin, windows.reach)):
                self._keep_window(number, wait)
        return node

    # Windows: blocks are known while a turn sees them, so that others can go on from where it is; kept are those that
    # are seen from a mark.

    def _seal_window(self, node: Node, number: int) -> None:
        block = self.kv.windows[number]
        sealed = self._index.seal_beside(node, WINDOW, block) if block != GONE else None
        if sealed is not None:
            self._windows[number], self.kv.windows[number] = sealed

    def _keep_window(self, number: int, wait: bool) -> None:
        node = self._windows.pop(number, None)
        if node is not None:
            self._claim([node])
            self._histories.save_block(node, wait)

    def _marks_from(self, begin: int, reach: int) -> Iterator[int]:
        """The marks from which the block that begins here may be seen."""
        every = self._context.marks.every
        yield (begin // every + 1) * every
        at = bisect.bisect_right(self._marks, begin)
        yield from takewhile(lambda mark: mark <= begin + self._index.block_tokens + reach, self._marks[at:])

    def _is_mark(self, position: int) -> bool:
        """Whether a state is to be kept after so many tokens, which fill blocks."""
        if not position or position % self._index.block_tokens:
            return False
        at = bisect.bisect_left(self._marks, position)
        return position % self._context.marks.every == 0 or position in self._marks[at : at + 1]

    def _keep_state(self, node: Node, wait: bool) -> None:
        """The state of now is that behind a node's tokens."""
        assert node.end == self.kv.length
        sealed = self._index.seal_beside(node, STATE, self.kv.state)
        if sealed is not None:
            beside, block = sealed
            self.kv.use_state(block)
            self._claim([beside])
            self._histories.save_block(beside, wait)

    def _drop_unseen(self) -> None:
        """What this turn does not see any more and nobody keeps leaves memory."""
        blocks = self.kv.windows
        for number in [n for n in self._windows if n >= len(blocks) or blocks[n] == GONE]:
            self._index.cool(self._windows.pop(number))

    def _positions(self, chain: list[Node]) -> tuple[int, ...]:
        """Where this history can be gone on from later."""
        index, end = self._index, chain[-1].end if chain else 0
        if not self._context.marks.every or not end:
            return ()
        common = common_tokens(self.history.tokens, self._tokens)
        earlier = [position for position in self.history.positions if position <= common]
        earlier.append(self._context.marks.last(self.receipt.prompt_tokens))
        marks = {mark for mark in self._context.marks.positions(self._tokens, earlier) if mark < end}
        with index.lock:
            return tuple(
                position for position in sorted({*marks, end}) if index.resume(chain, position).position == position
            )

    def _seal_rest(self, wait: bool) -> list[Node]:
        """Seal everything that was computed, the partial block at the end as well; all of the chain."""
        self.seal_full(wait)
        covered = min(self.kv.length, len(self._tokens) // 4)
        chain = list(self._sealed)
        if covered > len(chain) * self._index.block_tokens:
            end = self._seal(len(chain) * self._index.block_tokens, covered, wait)
            chain += [end] if end is not None else []
        if (windows := self._index.windows) is not None and chain:
            for number in windows.numbers(chain[-1].end):
                self._seal_window(chain[number], number)
                self._keep_window(number, wait)
        if self._index.states is not None and chain and chain[-1].end == self.kv.length:
            self._keep_state(chain[-1], wait)
        return chain

    def _claim(self, nodes: list[Node]) -> None:
        self._index.claim(nodes)
        self._claimed += nodes

    def _keep_claims(self, nodes: list[Node]) -> None:
        kept = set(map(id, nodes))
        claimed, self._claimed = self._claimed, []
        self._claimed = [node for node in claimed if id(node) in kept]
        self._index.release(node for node in claimed if id(node) not in kept)

    def _named_by_content(self) -> Agent:
        digest = hashlib.blake2b(self._tokens, digest_size=8, key=self._salt).hexdigest()
        name = f"{self.group or 'anonymous'}-{digest}"
        self.agent = self._histories.agents.claim_unnamed(name, self.tenant, self.group)
        self._histories.begin(self.agent)
        self.receipt.agent = self.agent.name
        return self.agent

    def _last_turn(self) -> LastTurn:
        """What is kept to explain this turn later."""
        receipt, before, at = self.receipt, self.history.last, self.receipt.diverged_at_char
        first = None if before is None or self._parent is not None else before.first or before.reuse
        return LastTurn(
            Reuse(receipt.prompt_tokens, receipt.cached_tokens),
            receipt.cause,
            receipt.reason,
            receipt.rules,
            Left.of(self.history.runs, at) if at is not None and self.history.runs else None,
            first,
        )

    def _settle(self, saving: "Future[int]", started: float) -> None:
        try:
            self.receipt.saved_bytes = saving.result()
            self.receipt.committed = True
        except StoreError as error:
            self.receipt.committed, self.receipt.error = False, str(error)
        self.receipt.save_s = time.perf_counter() - started

    def _explain(self, why: Why | None, whole_prompt: bool) -> None:
        """Say in the receipt how the prompt and the history fit, and what kept more from being reused."""
        receipt, history = self.receipt, self.history
        common = common_tokens(history.tokens, self._tokens)
        known = len(history.tokens) // 4
        if known and common < min(known, receipt.prompt_tokens):
            receipt.diverged_at_token = common
        receipt.match, found = self._compare(common, known, whole_prompt)
        if not receipt.cached_tokens and known:
            receipt.match = "none"
        expected = min(common, history.kv_tokens, receipt.prompt_tokens - 1)
        if history.lost:
            why = why or Why(Cause.LOST, history.lost)
        elif receipt.cached_tokens >= expected:
            why = None
        elif why is None and receipt.cached_tokens < receipt.known_tokens:
            why = Why(
                Cause.RECOMPUTED,
                f"known up to token {receipt.known_tokens:,}, it can be gone on from {receipt.cached_tokens:,}: "
                f"{receipt.known_tokens - receipt.cached_tokens:,} tokens are computed again",
            )
        elif why is None and known and (origin := self._parent or self.agent) is not None:
            why = self._index.why_lost(origin.chain(), receipt.cached_tokens)
        receipt.explain(why or found)

    def _compare(self, common: int, known: int, whole_prompt: bool) -> tuple[str, Why]:
        """How the prompt and a history of `known` tokens, `common` of them in common, fit."""
        receipt = self.receipt
        if whole_prompt and receipt.cached_tokens == receipt.prompt_tokens - 1:
            return "exact", Why(Cause.EXACT, "exact")
        if known and receipt.diverged_at_token is not None:
            at = "" if receipt.diverged_at_char is None else f", character {receipt.diverged_at_char}"
            return "diverged", Why(Cause.DIVERGED, f"diverged at token {common}{at}")
        if known:
            return "extended", Why(Cause.EXTENDED, "extended")
        if receipt.cached_tokens:
            return "shared", Why(Cause.SHARED, "prefix of another history")
        return "none", self._histories.why_unknown(self.tenant, self.agent)

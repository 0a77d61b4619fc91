"""Several threads in one store at once, with faults, little memory and a small quota; then power is lost at any moment.

The threads do what an engine and a server do at the same time: turns of all kinds, and requests about agents. One
thread at a time changes a named agent (`_owned`), so that what was promised of it has an order. Beside it, others force
its blocks out of memory or into it, or let it expire. What is compared: histories at the beginning of each turn, bytes
of KV, all counts at the end, and what crashes leave (`kv.crash`).
"""

import errno
import faulthandler
import itertools
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from everwarm.errors import AgentExistsError, CapacityError, StoreError, UnknownAgentError
from everwarm.kv.receipt import Receipt
from everwarm.kv.store import AgentStore
from everwarm.kv.tools.import_ import import_agent
from everwarm.types import Run
from kv import fake
from kv.audit import audit
from kv.crash import ROOT, Lookout, Moment, check_kv
from kv.fake import BLOCK_TOKENS, CAPACITY
from kv.hostile import HostileFiles
from kv.lives import Setting
from kv.promises import ABSENT, Acknowledged, Begun, Born, State, Who, found_in, spelt

LONGEST = 6 * BLOCK_TOKENS
NAMES = [f"agent {number}" for number in range(6)]
COPIES = [f"copy {number}" for number in range(3)]
DEEDS = {
    "talk": 12, "nameless": 4, "fork": 2, "pin": 1, "unpin": 1, "delete": 1, "import": 1,
    "evict": 3, "warm": 2, "export": 1, "expire": 0.5, "faults": 1,
}  # fmt: skip


class Crowd:
    """A store and what its threads promise."""

    def __init__(self, directory: Path, setting: Setting, seed: int, *, faults: bool) -> None:
        self.directory, self.setting, self.seed, self.faults = directory, setting, seed, faults
        self.counts: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self.files = HostileFiles(directory)
        self._clock = itertools.count(1000)
        self.store = self._open(self.files)
        self.files.lock = self.store.index.lock
        self._numbers = itertools.count(1)
        self._view: dict[Who, State] = {}
        self._old: dict[Who, tuple[int, ...]] = {}  # agents that an expiry may take, unless they have spoken since
        self._saving: list[tuple[int, Receipt]] = []
        self._owners: defaultdict[Who, threading.Lock] = defaultdict(threading.Lock)
        self._exports: list[tuple[Path, tuple[int, ...]]] = []

    def _open(self, files: HostileFiles) -> AgentStore:
        return fake.open_store(
            self.directory / ROOT,
            self.setting.budget_blocks,
            quota=self.setting.quota,
            durability=self.setting.durability,
            restore=self.setting.restore,
            files=files,
            clock=lambda: float(next(self._clock)),
        )

    def run(self, threads: int, deeds: int) -> None:
        """Raises the first failure of a thread."""
        workers = [threading.Thread(target=self._work, args=(n, deeds), daemon=True) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(400)
            if worker.is_alive():
                faulthandler.dump_traceback(all_threads=True)
                raise AssertionError("a deadlock: see the stacks above")
        if self.failures:
            raise self.failures[0]

    def _work(self, number: int, deeds: int) -> None:
        draw = random.Random(1000 * self.seed + number)
        try:
            for _ in range(deeds):
                if self.failures:
                    return
                fired = self.files.fired
                try:
                    self._act(draw)
                except CapacityError:
                    self.counts["turns without memory"] += 1
                except (UnknownAgentError, AgentExistsError):
                    self.counts["no such agent"] += 1
                except StoreError as error:
                    full = self.setting.quota_blocks is not None and "quota" in str(error)
                    if not (full or self.files.fired > fired):
                        raise AssertionError(f"refused without a reason: {error}") from error
                    self.counts["refused"] += 1
        except BaseException as error:
            self.failures.append(error)

    def _act(self, draw: random.Random) -> None:
        deed = draw.choices(list(DEEDS), list(DEEDS.values()))[0]
        tenant = draw.choice(["default", "default", "other"])
        name, new = draw.choice([*NAMES, *COPIES]), draw.choice(COPIES)
        who, copy = (tenant, name), (tenant, new)
        self.counts[deed] += 1
        match deed:
            case "talk":
                with self._owned(who):
                    self._talk(who, draw)
            case "nameless":
                self._talk_nameless(tenant, draw)
            case "fork" if who != copy:
                with self._owned(who, copy):
                    self._change(copy, State(self._now(who).tokens), lambda: self.store.fork(name, new, tenant))
            case "pin" | "unpin":
                with self._owned(who):
                    state = State(self._now(who).tokens, deed == "pin")
                    self._change(who, state, lambda: self.store.pin(name, deed == "pin", tenant))
            case "delete":
                with self._owned(copy):
                    self._now(copy)
                    self._change(copy, ABSENT, lambda: self.store.delete(new, tenant))
            case "import" if self._exports:
                path, tokens = draw.choice(self._exports)
                with self._owned(copy):
                    trust = draw.random() < 0.5
                    self._change(copy, State(tokens), lambda: import_agent(self.store, path, new, tenant, trust=trust))
            case "evict":
                self.store.evict(name, tenant)
            case "warm":
                self.store.warm_up(name, tenant)
            case "export":
                with self._owned(who):  # else it is not known which history it has
                    path = self.directory / f"export {next(self._numbers)}"
                    tokens = self._now(who).tokens
                    fake.export_agent(self.store, name, path, tenant)
                    self._exports.append((path, tokens))
            case "expire":
                self._expire()
            case "faults" if self.faults:
                kind = draw.choice(["write", "sync", "rename", "unlink", "sync_directory", "any"])
                self.files.arm(kind, draw.randrange(1, 20), errno.EIO, lasting=draw.random() < 0.2)
            case "faults":
                self.files.heal()
        if draw.random() < 0.1:
            self.files.heal()

    # Turns ------------------------------------------------------------------------------------------------------------

    def _talk(self, who: Who, draw: random.Random) -> None:
        tenant, name = who
        with self.store.open_turn(name, CAPACITY, tenant) as turn:
            before = self._now(who, turn.history.ids)
            assert tuple(turn.history.ids) == before.tokens, f"{who}: not the history that it left behind"
            known = list(before.tokens) if len(before.tokens) <= LONGEST else []
            if known and draw.random() < 0.2:
                known = known[: draw.randrange(len(known))]
            tokens = self._say(turn, known, draw)
            if tokens is None:
                return
            state = State(tuple(tokens), before.pinned)
            number = self._begun(who, state)
            receipt = turn.commit((Run(spelt(tokens), False, len(tokens)),))
            self._view[who] = state
            self._old.pop(who, None)
        self._saved(number, receipt)

    def _talk_nameless(self, tenant: str, draw: random.Random) -> None:
        group = draw.choice(["", "g"])
        with self.store.open_turn(None, CAPACITY, tenant, group=group) as turn:
            if draw.random() < 0.6:
                with self.store.index.lock:
                    digests = [key[2] for key in self.store.agents.by_text if key[:2] == (tenant, group)]
                turn.continue_branch(draw.sample(digests, min(2, len(digests))))
            known = list(turn.history.ids) if len(turn.history.ids) <= LONGEST else []
            tokens = self._say(turn, known, draw)
            if tokens is None:
                return
            state = State(tuple(tokens), anonymous=not group)
            if turn.agent is None:
                self.files.mark(Born(tenant, state))
            else:
                self._begun((tenant, turn.agent.name), state)
            receipt = turn.commit((Run(spelt(tokens), False, len(tokens)),))
            self._begun((tenant, receipt.agent), state)  # a conversation that others may go on from at once

    def _say(self, turn: fake.Turn, known: list[int], draw: random.Random) -> list[int] | None:
        """A prompt and an answer; None if the turn is abandoned."""
        prompt = [*known, *[draw.randrange(3)] * draw.choice([1, 4, 8, 9, 16])]
        turn.acquire(prompt)
        fake.check(turn, prompt)
        turn.computed(1, draw.choice([1e3, 1e-9]))
        answer = [draw.randrange(3) for _ in range(draw.randrange(1, 12))]
        half = [*prompt, *answer[: len(answer) // 2]]
        turn.append(answer[: len(answer) // 2])
        fake.compute(turn, half, draw.choice([1, 5, 20]))
        if draw.random() < 0.2:
            turn.suspend()
            turn.resume()
            fake.check(turn, half)
        turn.append(answer[len(answer) // 2 :])
        tokens = [*prompt, *answer]
        fake.compute(turn, tokens[:-1], draw.choice([1, 5, 20]))
        fake.check(turn, tokens)
        return None if draw.random() < 0.1 else tokens

    # Agents -----------------------------------------------------------------------------------------------------------

    def _expire(self) -> None:
        """Agents that were not used for long; one that speaks meanwhile stays."""
        before = float(next(self._clock) - 150)
        for who, state in list(self._view.items()):
            agent = self.store.agents.by_name.get(who)
            if agent is not None and agent.used < before:  # pinned ones, too: they may be unpinned in time
                self._old[who] = state.tokens
                self._begun(who, ABSENT)
        self.store.expiry.remove_unused_since(before)

    def _change(self, who: Who, state: State, change: Callable[[], object]) -> None:
        number = self._begun(who, state)
        try:
            change()
        except StoreError as error:
            if state != ABSENT or who in self.store.agents.by_name or isinstance(error, UnknownAgentError):
                raise
            self.counts["removed, but for some blocks"] += 1
        self.files.mark(Acknowledged(number))
        self._view[who] = state
        if self._old.get(who) == state.tokens:  # a pin does not make it younger
            self._begun(who, ABSENT)

    def _now(self, who: Who, found: list[int] | None = None) -> State:
        """What is known of an agent that this thread owns. An expiry may have taken it."""
        gone = who not in self.store.agents.by_name if found is None else not found
        if gone and who in self._view and self._old.get(who) == self._view[who].tokens:
            del self._view[who], self._old[who]
        return self._view.get(who, ABSENT)

    @contextmanager
    def _owned(self, *whos: Who) -> Iterator[None]:
        with ExitStack() as locks:
            for who in sorted(whos):
                locks.enter_context(self._owners[who])
            yield

    def _begun(self, who: Who, state: State) -> int:
        number = next(self._numbers)
        self.files.mark(Begun(who, state, number))
        return number

    def _saved(self, number: int, receipt: Receipt) -> None:
        """Note the turns that have been saved since, this one among them."""
        self._saving.append((number, receipt))
        for one in list(self._saving):
            if one[1].committed is not None:
                if one[1].committed:
                    self.files.mark(Acknowledged(one[0]))
                    self.counts["acknowledged"] += 1
                if one in self._saving:
                    self._saving.remove(one)

    # The end ----------------------------------------------------------------------------------------------------------

    def finish(self, crashes: int) -> None:
        """All threads have ended: count everything, lose power in so many places, close, open again."""
        self.files.heal()
        self.store.flush()
        for who in list(self._view):
            self._now(who)
        found = found_in(self.store)
        named = {who: state for who, state in found.items() if who[1] in NAMES or who[1] in COPIES}
        assert named == {who: state for who, state in self._view.items() if state != ABSENT}
        audit(self.store)
        assert self.store.warm.bytes + self.store.shared.other_bytes <= self.setting.quota
        self._look_after_crashes(crashes)
        self.store.close()
        assert self.store.index.pool.in_use == self.store.index.pool.memory.in_use == 0
        saved = {who for who, agent in self.store.agents.by_name.items() if agent.unsaved is None}
        assert len(saved) == len(found) or self.setting.quota_blocks is not None
        reopened = self._open(HostileFiles(self.directory))
        assert (reopened.read_only, reopened.warm.quarantine.count) == ("", 0)
        again = found_in(reopened)
        assert {who: state for who, state in again.items() if who in saved} == {who: found[who] for who in saved}
        assert set(again) <= set(found), "an agent that was removed is there again"
        check_kv(reopened)
        audit(reopened)
        reopened.close()

    def _look_after_crashes(self, count: int) -> None:
        chance = random.Random(self.seed)
        may_lose_kv = self.setting.quota_blocks is not None or self.files.fired > 0
        lookout = Lookout(self.directory, float(next(self._clock)), may_lose_kv)
        moment, done = Moment(), 0
        for entries in sorted(chance.randrange(len(self.files.log) + 1) for _ in range(count)):
            moment, done = moment.after(self.files.log[done:entries]), entries
            lookout.look(moment, [chance.choice([0.0, 0.3, 0.7, 1.0])], chance)
        self.counts["states after power loss"] += len(lookout.seen)

"""A store in a directory whose disk fails and loses power: opened, closed, killed, opened again, and checked.

A crash goes back to any earlier operation on files, builds what a disk may have kept of it, opens that and goes on from
there. What was acknowledged until then must be there (`kv.promises`).
"""

import itertools
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from everwarm.errors import StoreError
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.receipt import Receipt
from everwarm.kv.store import AgentStore
from everwarm.kv.tools import gc, verify
from everwarm.kv.turn import Turn
from everwarm.kv.warm.shared import unshare
from kv import fake
from kv.audit import audit
from kv.crash import ROOT, Lookout, Moment, check_kv, key_of
from kv.fake import BLOCK_TOKENS, TOKEN_BYTES
from kv.hostile import FailingReads, HostileFiles
from kv.promises import ABSENT, Acknowledged, Begun, Settled, State, Who, found_in
from kv.simulated_disk import Operation, SimulatedDisk, Tree, build

EXPORTS = Path("exports")  # a directory that is always there
FILE_BYTES = 4096 + BLOCK_TOKENS * TOKEN_BYTES


@dataclass(frozen=True)
class Setting:
    """How the store is opened, each time."""

    budget_blocks: int | None = None
    quota_blocks: int | None = None  # None: more than is ever needed
    durability: str = "turn"
    restore: str = "always"

    @property
    def quota(self) -> int:
        return 1 << 40 if self.quota_blocks is None else self.quota_blocks * FILE_BYTES


@dataclass
class OpenTurn:
    """A turn that is going on."""

    turn: Turn
    tokens: list[int]
    prompt_tokens: int  # an engine computes all of these, and of the answer all but the last
    suspended: bool = False

    @property
    def computed(self) -> list[int]:
        return self.tokens[: max(self.prompt_tokens, len(self.tokens) - 1)]


class Lives:
    """One store after the other in the same directory, and what was promised of it."""

    def __init__(self, directory: Path, setting: Setting, reads: FailingReads) -> None:
        self.directory = directory
        self.reads = reads
        self.setting = setting
        self.counts: Counter[str] = Counter()
        self.now = 1000.0
        self.damaged: set[str] = set()
        self.view: dict[Who, State] = {}  # what the store must say of its agents now
        self.turns: list[OpenTurn] = []
        self._numbers = itertools.count(1)
        self._lives = itertools.count()
        self._fired = 0  # in earlier lives
        self._begin_life(Moment(), {}, 0)

    def _begin_life(self, before: Moment, tree: Tree, inode: int) -> None:
        """On a disk with these files; a new recording begins."""
        for names in (before.disk.safe, before.disk.now):
            names[EXPORTS] = None
        tree = {EXPORTS: None, **tree}
        self._before = before
        self._promises = before.promises.copy()
        self.base = self.directory / f"life {next(self._lives)}"
        build(tree, self.base)
        self.files = HostileFiles(self.base, inode)
        self._open()

    def _open(self, most_age_s: float | None = None) -> None:
        self.turns, self._saving = [], list[tuple[int, Receipt, int]]()
        self.files.lock = None
        self.store: AgentStore = fake.open_store(
            self.base / ROOT,
            self.setting.budget_blocks,
            quota=self.setting.quota,
            durability=self.setting.durability,
            restore=self.setting.restore,
            most_age_s=most_age_s,
            files=self.files,
            clock=lambda: self.now,
        )
        self.files.lock = self.store.index.lock
        quarantine = self.base / ROOT / "quarantine"
        odd = {path.name.split(".")[2] for path in quarantine.iterdir()} if quarantine.is_dir() else set[str]()
        assert odd <= self.damaged, "a file that nobody has damaged is in quarantine"
        assert not self.store.read_only or self.files.fired
        # Deleted files that came back with a crash may be more than the quota, until the next file is written.
        self._ceiling = max(self.setting.quota, self._bytes)
        self.view = found_in(self.store)
        self._promises.check(self.view)
        if not self.store.read_only:  # then its directories were synced: what is found now stays
            for who in {*self.view, *self._promises.everyone}:
                self.mark(Settled(who, self.view.get(who, ABSENT)))

    def restart(self, *, collect: bool = False, most_age_s: float | None = None) -> None:
        """Close the store, perhaps remove what nobody owns, and open it again, perhaps without agents that are old."""
        for one in self.turns:
            one.turn.release()
        store, fired = self.store, self.files.fired
        store.close()
        assert store.index.pool.in_use == store.index.pool.memory.in_use == 0
        self._settle()
        for who in {*self.view, *self._promises.everyone}:
            agent = store.agents.by_name.get(who)
            saved = agent is None or agent.unsaved is None
            assert saved or store.read_only or self.files.fired > fired or self.setting.quota_blocks is not None
            if saved and not store.read_only and self.files.fired == fired:
                self.mark(Settled(who, self.view.get(who, ABSENT)))
        if collect:
            self._collect()
        self.files.mark(Operation("reopened"))
        if most_age_s is not None:
            for who in [who for who, state in self.view.items() if not state.pinned]:
                self.begun(who, ABSENT)
        self._open(most_age_s)

    def _collect(self) -> None:
        """What `everwarm agents gc` and `everwarm agents verify --repair` do."""
        self.files.heal()
        self.reads.left = 0
        root = self.base / ROOT
        store = DirectoryStore(root, self.files)
        gc.carry_out(store, gc.plan(store, before=0.0, quota=1 << 40))
        damaged = {key_of(Path(finding.path)) for finding in verify.repair(store).damaged}
        assert damaged <= self.damaged, "verify finds damage that nobody has done"

    def crash(self, back: int, *, power: bool, seed: int) -> None:
        """Go back by so many entries of the recording. There the process is killed, or power is lost."""
        chance = random.Random(seed)
        moment = self._moment(len(self.files.log) - back % (len(self.files.log) + 1))
        if power:
            tree = moment.left(chance.choice([0.0, 0.5, 1.0]), chance)
            moment.check_blocks(tree, self.damaged, deleted=self._may_lose_kv)
            moment.disk = SimulatedDisk.of(tree)
        else:
            moment.disk.do(Operation("reopened"))
            tree = moment.disk.as_seen()
        unshare(self.store.shared, self.store.ids.directory)
        shutil.rmtree(self.base)
        self._fired += self.files.fired
        self.counts["power lost" if power else "killed"] += 1
        self._begin_life(moment, tree, self.files.last_inode)

    def check_crashes(self, count: int, seed: int) -> None:
        """Lose power in so many places and look; then go on as if nothing had happened."""
        chance, lookout = random.Random(seed), self._lookout()
        for _ in range(count):
            moment = self._moment(chance.randrange(len(self.files.log) + 1))
            lookout.look(moment, [chance.choice([0.0, 0.3, 0.7, 1.0])], chance)
        self.counts["states after power loss"] += len(lookout.seen)

    def check_crash(self, back: int, seed: int) -> None:
        """Look at what a power loss would leave, so many entries of the recording ago."""
        lookout = self._lookout()
        moment = self._moment(max(0, len(self.files.log) - back))
        lookout.look(moment, [0.0, 0.5, 1.0], random.Random(seed))
        self.counts["states after power loss"] += len(lookout.seen)

    def check_every_crash(self, subsets: int, seed: int = 0) -> int:
        """Lose power after each operation: with all changes lost that can be, with none lost, and with some. How many
        different states there were.
        """
        chance, lookout = random.Random(seed), self._lookout()
        for entries in range(len(self.files.log) + 1):
            lookout.look(self._moment(entries), [0.0, 1.0, *[0.5] * subsets], chance)
        return len(lookout.seen)

    def after_crash(self) -> Tree:
        """What is left if power is lost now and nothing survives that was on its way."""
        return self._moment(len(self.files.log)).left(0.0, random.Random(0))

    def _moment(self, entries: int) -> Moment:
        return self._before.after(self.files.log[:entries])

    def _lookout(self) -> Lookout:
        self.reads.left = 0
        return Lookout(self.directory, self.now, self._may_lose_kv, self.damaged)

    def close(self) -> None:
        """The end: all that was said is there."""
        self.files.heal()
        self.reads.left = 0
        self.restart()
        assert not self.store.read_only
        check_kv(self.store)
        self.check()
        self.store.close()

    # Book-keeping -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """After each deed: every history, every count."""
        self.now += 1.0
        self._settle()
        found = found_in(self.store)
        for who, state in list(self.view.items()):
            if state.may_go and who not in found:
                del self.view[who]
                self.begun(who, ABSENT)
        assert found == self.view
        assert self._bytes <= self._ceiling, f"{self._bytes:,} bytes, the quota is {self.setting.quota:,}"
        self._ceiling = max(self.setting.quota, self._bytes)
        audit(self.store, [one.turn for one in self.turns])

    @property
    def undisturbed(self) -> bool:
        """Whether nothing has happened for which KV could be lost."""
        return not (self._may_lose_kv or self.damaged)

    @property
    def _may_lose_kv(self) -> bool:
        """Whether the quota or a failed save may have cost a history blocks. They are computed again."""
        return self.setting.quota_blocks is not None or self._fired + self.files.fired > 0

    @property
    def _bytes(self) -> int:
        return self.store.warm.bytes + self.store.shared.other_bytes

    def saving(self, number: int, receipt: Receipt, fired: int) -> None:
        """This turn is acknowledged as soon as its receipt says so. `fired` faults had been injected when it began."""
        self._saving.append((number, receipt, fired))

    def _settle(self) -> None:
        waiting, self._saving = self._saving, []
        for number, receipt, fired in waiting:
            if receipt.committed is None:
                self._saving.append((number, receipt, fired))
            elif receipt.committed:
                self.mark(Acknowledged(number))
                self.counts["acknowledged"] += 1
            else:
                self._explain(str(receipt.error), fired)
                self.counts["turns that were not saved"] += 1

    @contextmanager
    def refusable(self, deed: str, who: Who | None = None) -> Iterator[None]:
        """A deed may be refused, for a reason. If only one call has failed, the agent that it was about is as it was
        before, also after a crash.
        """
        fired = self.files.fired
        try:
            yield
            self.counts[deed] += 1
        except StoreError as error:
            self._explain(str(error), fired)
            self.counts[f"{deed} refused"] += 1
            agent = self.store.agents.by_name.get(who) if who is not None else None
            saved = agent is None or agent.unsaved is None
            if who is not None and saved and self.files.fired == fired + 1 and not self.files.lasting:
                self.mark(Settled(who, self.view.get(who, ABSENT)))

    def _explain(self, error: str, fired: int) -> None:
        full = self.setting.quota_blocks is not None and "quota" in error
        assert full or self.files.fired > fired or self.store.read_only, f"refused without a reason: {error}"

    def begun(self, who: Who, state: State) -> int:
        number = next(self._numbers)
        self.mark(Begun(who, state, number))
        return number

    def mark(self, mark: object) -> None:
        self.files.mark(mark)
        self._promises.note(mark)

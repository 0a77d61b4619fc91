"""Power is lost after any operation on files: what a disk may have kept then opens, verifies, and has every turn
that was acknowledged.
"""

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from everwarm.kv import container
from everwarm.kv.store import AgentStore
from kv import fake
from kv.fake import BLOCK_TOKENS, CAPACITY
from kv.simulated_disk import Killed, Operation, RecordedFiles, SimulatedDisk, UnsyncedFiles, build, memory_directory

ROOT = Path("home/agents")  # neither is there at first
Who = tuple[str, str]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


@pytest.fixture(params=[(), ("state",)], ids=["blocks", "states"])
def kinds(request: pytest.FixtureRequest) -> Iterator[None]:
    """Of models: one without and one with a state."""
    with fake.having(*request.param):
        yield


@dataclass(frozen=True)
class State:
    """Of an agent: its history, how many of its tokens have KV, and whether it is pinned. No tokens: no agent."""

    tokens: tuple[int, ...] = ()
    kv_tokens: int = 0
    pinned: bool = False


@dataclass(frozen=True)
class Begun:
    """An agent is about to change: from now on it may be found in either state."""

    who: Who
    state: State


@dataclass(frozen=True)
class Acknowledged:
    """From now on it must be found in this state."""

    who: Who
    state: State


class Scribe:
    """Changes agents and writes down what was promised."""

    def __init__(self, base: Path, files: RecordedFiles | None = None, **options: Any) -> None:
        self.files = files or RecordedFiles(base)
        self.states: dict[Who, State] = {}
        base.mkdir(exist_ok=True)
        self._open = partial(fake.open_store, base / ROOT, files=self.files, **options)
        self.store = self._open()
        assert not self.store.read_only

    def reopen(self) -> None:
        quota = self.store.shared.quota
        self.store.close()
        self.store = self._open(quota=quota)

    def talk(self, name: str | None, prompt: Sequence[int], answer: Sequence[int] = (), tenant: str = "") -> None:
        history = (*prompt, *answer)
        who = (tenant or "default", name or "")
        state = State(history, len(history) - bool(answer), self.states.get(who, State()).pinned)
        blocks, syncs = self.store.counters["saved_blocks"], self._syncs()
        known = who[0] == "default" or any(tenant == who[0] for tenant, _ in self.states)
        if name is not None:
            self.files.mark(Begun(who, state))
        receipt = fake.talk(self.store, name, prompt, answer, tenant)
        assert receipt.committed
        self._done((who[0], receipt.agent), state)
        new_blocks = self.store.counters["saved_blocks"] - blocks
        assert self._syncs() - syncs <= new_blocks + 3 + (0 if known else 2)  # a new tenant's salt is kept first

    def fork(self, name: str, new: str) -> None:
        state = State(self.states["default", name].tokens, self.states["default", name].kv_tokens)
        self._change(new, state, lambda: self.store.fork(name, new))

    def pin(self, name: str) -> None:
        state = State(self.states["default", name].tokens, self.states["default", name].kv_tokens, pinned=True)
        self._change(name, state, lambda: self.store.pin(name))

    def delete(self, name: str) -> None:
        self._change(name, State(), lambda: self.store.delete(name))

    def _change(self, name: str, state: State, change: Callable[[], None]) -> None:
        self.files.mark(Begun(("default", name), state))
        change()
        self._done(("default", name), state)

    def _done(self, who: Who, state: State) -> None:
        self.files.mark(Acknowledged(who, state))
        self.states[who] = state

    def _syncs(self) -> int:
        return sum(isinstance(one, Operation) and one.kind in ("sync", "sync_directory") for one in self.files.log)


Promises = dict[Who, frozenset[State]]  # the states in which an agent may be found


def prefixes(log: list[Operation | object]) -> Iterator[tuple[SimulatedDisk, Promises, set[Path]]]:
    """The disk after every operation, what was promised until then, and which blocks were deleted."""
    disk, promises = SimulatedDisk(), dict[Who, frozenset[State]]()
    deleted, written = set[Path](), set[Path]()
    for one in log:
        match one:
            case Begun(who, state):
                promises[who] = promises.get(who, frozenset({State()})) | {state}
            case Acknowledged(who, state):
                promises[who] = frozenset({state})
                deleted -= written
                written.clear()
            case Operation():
                disk.do(one)
                written.add(one.new)
                if one.kind == "unlink":
                    deleted.add(one.path)
                    written.discard(one.path)
        yield disk, dict(promises), set(deleted)


def check_directory(base: Path, promises: Promises, deleted: set[Path]) -> None:
    """It opens, nothing in it is damaged or left over, and every agent is as it was promised."""
    store = fake.open_store(base / ROOT, files=UnsyncedFiles())
    try:
        assert (store.read_only, store.warm.quarantine.count, store.counters["corrupt"]) == ("", 0, 0)
        assert not list(base.rglob("*.part"))
        verify(store)
        for who, states in promises.items():
            check_agent(store, base, who, states, deleted)
        known = {who for who in store.agents.by_name if not who[1].startswith("anonymous")}
        assert known <= set(promises)
    finally:
        store.close()
    assert store.index.pool.in_use == 0


def verify(store: AgentStore) -> None:
    """Every file is whole, and the quota counts each once."""
    total = 0
    for path in [*fake.directory(store).glob("blocks/*"), *fake.directory(store).glob("manifests/*")]:
        container.decode(path.read_bytes())
        total += path.stat().st_size
    assert store.warm.bytes == total


def check_agent(store: AgentStore, base: Path, who: Who, states: frozenset[State], deleted: set[Path]) -> None:
    tenant, name = who
    agent = store.agents.by_name.get(who)
    if agent is None:
        assert State() in states, f"{name} is gone"
        return
    with store.open_turn(name, CAPACITY, tenant) as turn:
        found = State(tuple(turn.history.ids), turn.history.kv_tokens, agent.pinned)
        assert found in states, f"{name} is at a turn that it should not be at"
        prompt = [*found.tokens, 1]
        receipt = turn.acquire(prompt)
        fake.check(turn, prompt)
    paths = [fake.block_path(store, node.key).relative_to(base) for node in agent.chain()]
    gone = [number for number, path in enumerate(paths) if path in deleted]  # by quota
    if gone:
        assert fake.apart or receipt.cached_tokens >= gone[0] * BLOCK_TOKENS  # a state before it need not be there
    else:
        assert receipt.cached_tokens >= found.kv_tokens  # more if the next turn has left a block


def check_every_crash(log: list[Operation | object], tmp_path: Path, subsets: int) -> int:
    """Lose power after each operation, with all changes of names lost that can be, with none lost, and with some."""
    base, seen, chance = tmp_path / "crashed", set[int](), random.Random(5)
    outcomes: list[Callable[[Operation], bool]] = [lambda _: False, lambda _: True]
    outcomes += [lambda _: chance.random() < 0.5] * subsets
    for disk, promises, deleted in prefixes(log):
        for survives in outcomes:
            tree = disk.crash(survives, chance)
            found = hash((frozenset(tree.items()), frozenset(promises.items())))
            if found in seen:
                continue
            seen.add(found)
            build(tree, base)
            check_directory(base, promises, deleted)
            shutil.rmtree(base)
    return len(seen)


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


@pytest.mark.usefixtures("kinds")
def test_growing_histories_survive_power_loss(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "run")
    history = tokens(1, 13)
    for turn in range(4):
        history += tokens(10 + turn, 5)
        scribe.talk("alice", history, tokens(20 + turn, 3))
        history += tokens(20 + turn, 3)
    scribe.talk("bob", [*history, 1, 2])  # shares all but the end
    scribe.talk("bob", [*history[:20], *tokens(2, 9)])  # diverges
    scribe.talk("alice", [*history, 7])
    scribe.store.close()
    assert check_every_crash(scribe.files.log, tmp_path, subsets=5) > 150


@pytest.mark.usefixtures("kinds")
def test_forks_pins_and_deletes_survive_power_loss(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "run")
    history = tokens(1, 21)
    scribe.talk("alice", history)
    scribe.fork("alice", "bob")
    scribe.talk("alice", [*history, 1])  # its old end stays, it is bob's
    scribe.pin("bob")
    scribe.talk("bob", [*history, 2, 3, 4, 5])
    scribe.delete("alice")
    scribe.talk("alice", history[:12])  # another one with this name
    scribe.talk(None, tokens(3, 10))
    scribe.talk("alice", tokens(4, 10), tenant="other")
    scribe.delete("bob")
    scribe.delete("alice")
    scribe.store.close()
    assert check_every_crash(scribe.files.log, tmp_path, subsets=3) > 150


def test_agents_under_a_quota_survive_power_loss(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "run")
    scribe.store.shared.quota = 9 * scribe.store.warm.block_bytes + 6 * 4700
    histories = {name: tokens(number, 14) for number, name in enumerate(["alice", "bob", "carol", "dave"])}
    scribe.talk("alice", histories["alice"])
    scribe.pin("alice")
    for turn in range(3):
        for name in ("bob", "carol", "dave"):
            histories[name] += tokens(turn, 5)
            scribe.talk(name, histories[name])
    assert scribe.store.counters["warm_evictions"] > 5
    scribe.store.close()
    assert check_every_crash(scribe.files.log, tmp_path, subsets=2) > 150


@pytest.mark.parametrize("seed", range(6))
def test_whatever_agents_do_survives_power_loss(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    scribe = Scribe(tmp_path / "run", budget_blocks=chance.choice([12, None]))
    if seed % 2:
        scribe.store.shared.quota = 14 * scribe.store.warm.block_bytes + 8 * 4700
    for step in range(14):
        names = [name for (tenant, name), state in scribe.states.items() if tenant == "default" and state.tokens]
        name = chance.choice(names or ["alice"])
        history = list(scribe.states.get(("default", name), State()).tokens)
        match chance.choice(["begin", "grow", "grow", "grow", "diverge", "fork", "pin", "delete", "evict", "restart"]):
            case "fork" if names:
                scribe.fork(name, f"fork {step}")
            case "pin" if names and not scribe.states["default", name].pinned:
                scribe.pin(name)
            case "delete" if names:
                scribe.delete(name)
            case "evict" if names:
                scribe.store.evict(name)
            case "grow" if names and len(history) < 60:
                scribe.talk(name, [*history, *tokens(step, chance.randrange(1, 12))], [1] * chance.randrange(4))
            case "diverge" if names:
                scribe.talk(name, [*history[: chance.randrange(len(history))], *tokens(step, 9)])
            case "restart":
                scribe.reopen()
            case _:
                scribe.talk(chance.choice(["alice", "bob", "carol"]), tokens(chance.randrange(2), 25))
    scribe.store.close()
    assert check_every_crash(scribe.files.log, tmp_path, subsets=2) > 80


class ForgetfulFiles(RecordedFiles):
    """One kind of sync is never done."""

    def __init__(self, base: Path, forgotten: str) -> None:
        super().__init__(base)
        self._forgotten = forgotten

    def sync(self, descriptor: int) -> None:
        if self._forgotten != "file":
            super().sync(descriptor)

    def sync_directory(self, path: Path) -> None:
        if path.name != self._forgotten:
            super().sync_directory(path)


@pytest.mark.parametrize("forgotten", ["file", "blocks", "manifests", "agents", "home", fake.model_ids().directory])
def test_the_simulation_notices_a_sync_that_is_forgotten(tmp_path: Path, forgotten: str) -> None:
    scribe = Scribe(tmp_path / "run", ForgetfulFiles(tmp_path / "run", forgotten))
    scribe.talk("alice", tokens(1, 20))
    scribe.talk("alice", tokens(1, 30))
    scribe.store.close()
    with pytest.raises(AssertionError):
        check_every_crash(scribe.files.log, tmp_path, subsets=0)


def test_an_acknowledged_delete_leaves_nothing_that_could_come_back(tmp_path: Path) -> None:
    scribe = Scribe(tmp_path / "run")
    scribe.talk("alice", tokens(1, 30))
    scribe.delete("alice")
    *_, (disk, _, _) = prefixes(scribe.files.log)
    tree = disk.crash(lambda _: False, random.Random(0))
    assert [path for path in tree if path.suffix == ".safetensors"] == []
    scribe.store.close()


def test_what_a_killed_process_left_is_safe_before_the_next_one_acknowledges(tmp_path: Path) -> None:
    """A process is killed after any operation of its start and first turn. The page cache has what it did, the disk
    perhaps not. The next process talks, then power is lost with all that no one has synced.
    """
    for operations in range(100):
        base = tmp_path / str(operations)
        files = RecordedFiles(base)
        files.left = operations
        try:
            killed = Scribe(base, files)
        except Killed:
            killed = None
        if killed is not None:
            with suppress(Killed):
                killed.talk("alice", tokens(1, 10))
                break  # it was not killed any more
            with suppress(Killed):
                killed.store.close()
        files.left = None
        scribe = Scribe(base, files)
        scribe.talk("alice", tokens(1, 10))
        scribe.talk("bob", tokens(2, 10))
        scribe.store.close()
        *_, (disk, promises, deleted) = prefixes(files.log)
        build(disk.crash(lambda _: False, random.Random(0)), tmp_path / "crashed")
        check_directory(tmp_path / "crashed", promises, deleted)
        shutil.rmtree(tmp_path / "crashed")
    else:
        pytest.fail("the first turn never ended")
    assert operations > 20


def test_a_second_crash_after_a_first_one(tmp_path: Path) -> None:
    first = Scribe(tmp_path / "run")
    first.talk("alice", tokens(1, 20))
    first.talk("alice", tokens(1, 27))
    first.store.close()
    chance = random.Random(7)
    for number, (disk, promises, _) in enumerate(prefixes(first.files.log)):
        base = tmp_path / str(number)
        tree = disk.crash(lambda _: chance.random() < 0.5, chance)
        build(tree, base)
        scribe = Scribe(base)
        if State() in promises.get(("default", "alice"), frozenset({State()})):
            scribe.talk("alice", tokens(1, 20))
        scribe.talk("alice", tokens(1, 32))
        scribe.store.close()
        again = SimulatedDisk()
        for inode, (path, data) in enumerate(tree.items(), start=1000):
            again.safe[path] = again.now[path] = None if data is None else inode
            again.written[inode] = again.synced[inode] = data or b""
        promised: Promises = {}
        for one in scribe.files.log:
            if isinstance(one, Operation):
                again.do(one)
            elif isinstance(one, Acknowledged):
                promised[one.who] = frozenset({one.state})
        build(again.crash(lambda _: False, chance), tmp_path / "crashed")
        check_directory(tmp_path / "crashed", promised, set())
        shutil.rmtree(tmp_path / "crashed")
        shutil.rmtree(base)

"""The agent store under eight threads, against a dict of histories. Faults, crashes and single sequences of operations
are in `test_machine.py`.

The dict says what each agent has heard and said; it is changed while the agent's turn is owned. Whatever happens in
which order: a turn begins with the history in the dict, what it finds in a cache are the bytes that computing would
have given (`kv.fake`), and the store's counts are what its agents and its files say (`check_store`).
"""

import faulthandler
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everwarm.errors import CapacityError, StoreError
from everwarm.kv.agent import Agent
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.disk.files import Files
from everwarm.kv.index.index import Index
from everwarm.kv.index.pool import HeapBlocks
from everwarm.kv.store import AgentStore
from everwarm.types import Run
from kv import fake
from kv.audit import audit
from kv.fake import BLOCK_TOKENS, CAPACITY, TOKEN_BYTES, check, compute, model_ids
from short_and_long import short_and_long
from waiting_until import PATIENCE_S

FILE_BYTES = 4096 + BLOCK_TOKENS * TOKEN_BYTES
LONGEST = 9 * BLOCK_TOKENS


class QuickFiles(Files):
    """Without the waits for a disk: order and crashes are tested elsewhere."""

    def sync(self, descriptor: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


class Watched(AgentStore):
    """A store that keeps a dict of histories beside itself."""

    def __init__(
        self, root: Path, budget_blocks: int, quota: int, histories: dict[str, list[int]], restore: str = "always"
    ) -> None:
        memory = HeapBlocks(BLOCK_TOKENS, BLOCK_TOKENS * TOKEN_BYTES)
        # The blocks of the fake model are smaller than what is needed to find them.
        index = Index(memory, budget_blocks * memory.block_bytes, node_bytes=0)
        self.expected = histories
        self.acting = threading.local()  # what this thread is about to do to an agent
        place = DirectoryStore(root, QuickFiles())
        super().__init__(index, model_ids(), place, quota=quota, restore=restore)
        self._leave = self.agents.leave
        self.agents.leave = self._before_leaving  # type: ignore[method-assign]

    def _before_leaving(self, agent: Agent) -> None:
        """The last moment at which the agent's turn is owned."""
        deed, name, source = getattr(self.acting, "deed", ("", "", ""))
        if deed == "delete" and name == agent.name and not agent.generation:
            self.expected.pop(name, None)
        if deed == "fork" and name == agent.name and agent.generation:
            self.expected[name] = list(self.expected[source])
        self._leave(agent)

    @contextmanager
    def deed(self, *words: str) -> Iterator[None]:
        self.acting.deed = words
        try:
            yield
        finally:
            self.acting.deed = ("", "", "")


def talk(store: Watched, name: str, draw: random.Random, deed: str) -> None:
    """One turn: go on, say it again, change the middle or begin anew; then commit or abandon it."""
    with store.open_turn(name, CAPACITY) as turn:
        known = turn.history.ids
        assert known == store.expected.get(name, []), f"{name}: not the history that it left behind"
        prompt = changed(known, draw, deed)
        turn.acquire(prompt)
        check(turn, prompt)
        answer = [draw.randrange(9) for _ in range(draw.randrange(1, 12))]
        history = [*prompt, *answer]
        for token in answer:
            turn.append([token])
        turn.computed(1, draw.choice([1e-9, 1e3]))  # so fast that reading is not worth it, or so slow that it is
        compute(turn, history[:-1], chunk=draw.choice([1, 5, 20]))
        check(turn, history)
        if deed == "abandon":
            return
        receipt = turn.commit((Run(str(history), False, len(history)),))
        assert receipt.committed or receipt.error
        store.expected[name] = history


def say_something(store: Watched, draw: random.Random) -> None:
    """A turn without a name."""
    prompt = [draw.randrange(3)] * draw.choice([4, 8, 20]) + [draw.randrange(50)]
    with store.open_turn(None, CAPACITY) as turn:
        turn.acquire(prompt)
        check(turn, prompt)
        compute(turn, prompt)
        receipt = turn.commit((Run(str(prompt), False, len(prompt)),))
        store.expected[receipt.agent] = prompt


def changed(known: list[int], draw: random.Random, deed: str) -> list[int]:
    """A prompt. Few different tokens, so that agents share beginnings by chance."""
    if deed == "again" and known:
        return known
    if deed == "edit" and known:
        known = known[: draw.randrange(len(known))]
    if len(known) > LONGEST:
        known = []
    new = [draw.randrange(3)] * draw.choice([1, 4, 8, 16, 30])
    return [*known, *new]


def act(store: Watched, name: str, other: str, deed: str, draw: random.Random) -> None:
    """Any operation. It may be refused, for want of an agent or of room; then nothing has happened."""
    try:
        match deed:
            case "evict":
                store.evict(name)
            case "pin" | "unpin":
                store.pin(name, deed == "pin")
            case "delete":
                with store.deed("delete", name, ""):
                    store.delete(name)
            case "anonymous":
                say_something(store, draw)
            case "fork":
                with store.deed("fork", other, name):
                    store.fork(name, other)
            case _:
                talk(store, name, draw, deed)
    except CapacityError:
        store.counters["test_no_room"] += 1
    except StoreError as error:
        said = str(error)
        assert "no such agent" in said or "exists already" in said or "quota" in said, said


def check_store(store: Watched) -> None:
    """Everything that is counted, counted again. Nobody has a turn."""
    store.flush()
    audit(store)
    manifests = {path.name: path.stat().st_size for path in (fake.directory(store) / "manifests").iterdir()}
    assert store.warm.bytes + store.shared.other_bytes <= store.shared.quota
    assert sum(store.warm.manifests.size(who) for who in store.agents.by_name) == sum(manifests.values())
    gone = set(store.expected) - {name for _, name in store.agents.by_name}
    assert all(name.startswith("anonymous") for name in gone)  # the quota may have taken them
    for (_, name), agent in store.agents.by_name.items():
        assert store.history(agent).ids == store.expected[name]
        assert (agent.waiting, agent.talks) == (0, False)


NAMES = [f"agent {number}" for number in range(6)]
DEEDS = [*["go on"] * 6, "again", "edit", "edit", "abandon", "evict", "evict", "fork", "delete", "pin", "unpin"]
DEEDS += ["anonymous"] * 3


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads change places a thousand times more often than they do by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("seed", "budget_blocks", "quota_blocks"), [(0, 60, 1000), (1, 20, 1000), (2, 60, 40), (3, 20, 30), (4, 14, 24)]
)
@pytest.mark.parametrize("restore", ["always", "auto"])
@short_and_long("deeds", 30, 60)
@pytest.mark.usefixtures("hurried")
def test_eight_threads_leave_what_their_turns_said_and_no_block_behind(
    tmp_path: Path, seed: int, budget_blocks: int, quota_blocks: int, restore: str, deeds: int
) -> None:
    histories: dict[str, list[int]] = {}
    store = Watched(tmp_path, budget_blocks, quota_blocks * FILE_BYTES, histories, restore)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        draw = random.Random(100 * seed + number)
        try:
            for _ in range(deeds):
                if failures:
                    return
                act(store, draw.choice(NAMES), draw.choice(NAMES), draw.choice(DEEDS), draw)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        if thread.is_alive():
            faulthandler.dump_traceback(all_threads=True)
            pytest.fail("a deadlock: see the stacks above")
    if failures:
        raise failures[0]
    check_store(store)
    store.close()
    assert store.index.pool.in_use == store.index.pool.memory.in_use == 0
    store = Watched(tmp_path, 1000, 10**9, histories)
    for name, history in histories.items():
        found = (
            store.history(store.agents.by_name["default", name]).ids
            if ("default", name) in store.agents.by_name
            else []
        )
        assert found == history or quota_blocks < 1000, name
    store.close()


def test_conversations_without_a_name_never_fill_the_quota(tmp_path: Path) -> None:
    """Each leaves a manifest. Neither these nor their blocks are in the way of a named agent, or of new ones."""
    histories: dict[str, list[int]] = {}
    store = Watched(tmp_path, 1000, 30 * FILE_BYTES, histories)
    draw = random.Random(0)
    talk(store, "alice", draw, "go on")
    for number in range(100):
        prompt = [1000 + number] * 20
        with store.open_turn(None, CAPACITY) as turn:
            turn.acquire(prompt)
            compute(turn, prompt)
            assert turn.commit((Run("", False, 20),)).error is None
        assert store.warm.bytes <= store.shared.quota
    store.evict("alice")
    with store.open_turn("alice", CAPACITY) as turn:
        assert turn.acquire([*histories["alice"], 1]).cached_tokens == len(histories["alice"]) - 1
    assert 2 < len(store.agents.by_name) < 31
    store.close()

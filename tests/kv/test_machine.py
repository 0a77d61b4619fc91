"""Any sequence of deeds in a world where everything can go wrong: see `kv.world`. `make soak-store MINUTES=20` does
the same for long, over many seeds.
"""

import errno
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kv import fake, soak
from kv.hostile import repeatable
from kv.lives import Setting
from kv.simulated_disk import memory_directory
from kv.world import MOST_TURNS, World

SETTINGS = st.builds(
    Setting,
    st.sampled_from([None, 6, 9, 16, 40]),
    st.sampled_from([None, 12, 20, 40]),
    st.sampled_from(["turn", "async"]),
    st.sampled_from(["always", "auto"]),
)
NAMES = st.sampled_from(soak.NAMES)
TENANTS = st.sampled_from(["default", "other"])
WHICH = st.integers(0, 9)
WORDS = st.builds(lambda token, count: [token] * count, st.integers(0, 2), st.sampled_from([1, 4, 8, 9, 16]))
CHUNKS = st.sampled_from([20, 5, 1])


someone_is_there = precondition(lambda self: self.world.view)
a_turn_is_open = precondition(lambda self: self.world.turns)
a_turn_can_begin = precondition(lambda self: len(self.world.turns) < MOST_TURNS)


class Machine(RuleBasedStateMachine):
    """One deed after the other; everything is compared after each."""

    @initialize(setting=SETTINGS, seed=st.integers(0, 99), kinds=st.sampled_from(fake.KINDS))
    def begin_world(self, setting: Setting, seed: int, kinds: tuple[str, ...]) -> None:
        self.seed = seed
        self.ends = ExitStack()
        self.ends.enter_context(fake.having(*kinds))
        reads = self.ends.enter_context(repeatable(seed))
        directory = self.ends.enter_context(memory_directory())
        self.world = World(directory, setting, reads)
        self.sound = True

    def do(self, deed: Callable[[], None]) -> None:
        self.sound = False
        deed()
        self.world.check()
        self.sound = True

    @a_turn_can_begin
    @rule(tenant=TENANTS, name=NAMES, which=WHICH, words=WORDS, answer=WORDS, chunk=CHUNKS, slow=st.booleans())
    def talk(
        self, tenant: str, name: str, which: int, words: list[int], answer: list[int], chunk: int, slow: bool
    ) -> None:
        def deed() -> None:
            self.world.begin(tenant, name, "", which, "on", words)
            self.world.grow(-1, answer, chunk, slow=slow)
            self.world.commit(-1, chunk)

        self.do(deed)

    @a_turn_can_begin
    @rule(tenant=TENANTS, name=NAMES, which=WHICH, kind=st.sampled_from(["on", "again", "edit", "anew"]), words=WORDS)
    def begin_named(self, tenant: str, name: str, which: int, kind: str, words: list[int]) -> None:
        self.do(lambda: self.world.begin(tenant, name, "", which, kind, words))

    @a_turn_can_begin
    @rule(tenant=TENANTS, group=st.sampled_from(["", "g"]), which=WHICH, words=WORDS)
    def begin_nameless(self, tenant: str, group: str, which: int, words: list[int]) -> None:
        self.do(lambda: self.world.begin(tenant, None, group, which, "on", words))

    @a_turn_is_open
    @rule(which=WHICH, words=WORDS, chunk=CHUNKS, slow=st.booleans())
    def grow(self, which: int, words: list[int], chunk: int, slow: bool) -> None:
        self.do(lambda: self.world.grow(which, words, chunk, slow=slow))

    @a_turn_is_open
    @rule(which=WHICH, chunk=CHUNKS)
    def commit(self, which: int, chunk: int) -> None:
        self.do(lambda: self.world.commit(which, chunk))

    @a_turn_is_open
    @rule(which=WHICH, how=st.sampled_from(["suspend", "resume", "abandon"]))
    def interrupt(self, which: int, how: str) -> None:
        self.do(lambda: getattr(self.world, how)(which))

    @someone_is_there
    @rule(which=WHICH, how=st.sampled_from(["evict", "warm_up", "delete", "export"]))
    def change(self, which: int, how: str) -> None:
        self.do(lambda: getattr(self.world, how)(which))

    @someone_is_there
    @rule(which=WHICH, new=NAMES)
    def fork(self, which: int, new: str) -> None:
        self.do(lambda: self.world.fork(which, new))

    @someone_is_there
    @rule(which=WHICH, pinned=st.booleans())
    def pin(self, which: int, pinned: bool) -> None:
        self.do(lambda: self.world.pin(which, pinned=pinned))

    @rule(which=WHICH, tenant=TENANTS, new=NAMES, trust=st.booleans())
    def import_(self, which: int, tenant: str, new: str, trust: bool) -> None:
        self.do(lambda: self.world.import_(which, tenant, new, trust=trust))

    @someone_is_there
    @rule(age=st.sampled_from([5.0, 20.0]))
    def expire(self, age: float) -> None:
        self.do(lambda: self.world.expire(age))

    @rule(jobs=st.integers(1, 4))
    def write(self, jobs: int) -> None:
        self.do(lambda: self.world.write(jobs))

    @someone_is_there
    @rule(which=st.integers(0, 10**5))
    def damage(self, which: int) -> None:
        self.do(lambda: self.world.damage(which))

    @someone_is_there
    @rule()
    def look(self) -> None:
        self.do(self.world.look)

    @rule(
        kind=st.sampled_from(soak.KINDS),
        nth=st.integers(1, 6),
        error=st.sampled_from([errno.EIO, errno.ENOSPC]),
        lasting=st.booleans(),
    )
    def arm(self, kind: str, nth: int, error: int, lasting: bool) -> None:
        self.world.files.arm(kind, nth, error, lasting=lasting)

    @rule(count=st.integers(1, 4), error=st.sampled_from([errno.EIO, errno.EMFILE]))
    def fail_reads(self, count: int, error: int) -> None:
        self.world.fail_reads(count, error)

    @rule()
    def heal(self) -> None:
        self.world.files.heal()

    @rule(collect=st.booleans())
    def restart(self, collect: bool) -> None:
        self.do(lambda: self.world.restart(collect=collect))

    @rule(back=st.integers(0, 60), power=st.booleans(), seed=st.integers(0, 99))
    def crash(self, back: int, power: bool, seed: int) -> None:
        self.do(lambda: self.world.crash(back, power=power, seed=seed))

    @rule(back=st.integers(0, 20), seed=st.integers(0, 99))
    def look_after_crash(self, back: int, seed: int) -> None:
        self.do(lambda: self.world.check_crash(back, seed))

    def teardown(self) -> None:
        with getattr(self, "ends", ExitStack()):
            if getattr(self, "sound", False):
                self.world.check_crashes(3, self.seed)
                self.world.close()


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=40)
TestAnySequenceOfDeeds: Any = Machine.TestCase


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of files are damaged and refused here; each is a line of the log."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", range(12))
def test_a_long_life_with_faults_and_crashes(seed: int) -> None:
    assert soak.live_world(seed)["acknowledged"] > 0


@pytest.mark.parametrize("seed", range(5))
def test_threads_with_faults_and_crashes(seed: int) -> None:
    assert soak.live_crowd(seed)["acknowledged"] > 0

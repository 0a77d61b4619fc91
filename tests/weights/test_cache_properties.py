"""Any sequence of operations on a weight cache, against a plain set of what is pinned and a count of what was asked."""

from contextlib import suppress

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_cache import LAYERS, NAMES, SIZE, TOTAL, Memory, content

from everwarm.errors import ConfigError, RequestError
from everwarm.weights.cache.cache import WeightCache

LEAST = TOTAL // LAYERS
names = st.sampled_from(NAMES)
some = st.lists(names, max_size=6)
budgets = st.integers(LEAST, TOTAL + SIZE)


class Operations(RuleBasedStateMachine):
    cache: WeightCache

    @initialize(budget=budgets, policy=st.sampled_from(["value", "lru", "pinned-prefix"]), ahead=st.integers(0, 3))
    def begin(self, budget: int, policy: str, ahead: int) -> None:
        self.source = Memory()
        self.cache = WeightCache(self.source, budget, policy, ahead=ahead, background=False)
        self.pinned: set[str] = set()
        self.asked = 0

    @rule(name=names)
    def get(self, name: str) -> None:
        self.asked += 1
        tensor = self.cache.get(name)
        assert (tensor == content(name)).all()
        if name in self.pinned:
            assert self.cache.get(name) is tensor
            self.asked += 1

    @rule()
    def scan(self) -> None:
        with self.cache.computing():
            for layer in range(LAYERS):
                self.cache.enter(layer)
                for name in NAMES[4 * layer : 4 * layer + 4]:
                    self.get(name)
        self.cache.optimize()

    @rule(chosen=some)
    def pin(self, chosen: list[str]) -> None:
        if len(self.pinned | set(chosen)) * SIZE > self.cache.budget:
            with pytest.raises(ConfigError, match="pin"):
                self.cache.pin(chosen)
        else:
            self.cache.pin(chosen)
            self.pinned |= set(chosen)

    @rule(chosen=some)
    def unpin(self, chosen: list[str]) -> None:
        self.cache.unpin(chosen)
        self.pinned -= set(chosen)

    @rule(chosen=some)
    def evict(self, chosen: list[str]) -> None:
        if self.pinned & set(chosen):
            with pytest.raises(RequestError, match="pinned"):
                self.cache.evict(chosen)
        else:
            self.cache.evict(chosen)
            assert not set(chosen) & set(self.cache._ready)

    @rule(layer=st.integers(0, LAYERS - 1))
    def preload_layer(self, layer: int) -> None:
        done = self.cache.preload_layer(layer)
        self.pinned |= set(NAMES[4 * layer : 4 * layer + 4]) - set(done.left_out)

    @rule(budget=budgets)
    def resize(self, budget: int) -> None:
        if len(self.pinned) * SIZE > budget:
            with pytest.raises(ConfigError, match="resize"):
                self.cache.resize(budget)
        else:
            self.cache.resize(budget)

    @rule(name=names)
    def fail_once(self, name: str) -> None:
        self.source.failing = {name}
        self.asked += name in self.cache._ready  # a hit needs no source
        with suppress(OSError):
            self.cache.get(name)
        self.source.failing = set()

    @rule()
    def use_again(self) -> None:
        known = list(self.cache._ready.items())
        tensors = [tensor for _, tensor in known]
        assert self.cache.use_again([name for name, _ in known], tensors)
        self.asked += len(known)
        assert not self.cache.use_again([NAMES[0]], [object()])

    @invariant()
    def accounts(self) -> None:
        stats = self.cache.stats()
        assert stats.uses == self.asked
        assert stats.resident * SIZE == self.cache._kept.bytes <= self.cache.budget
        assert stats.pinned_bytes == len(self.pinned) * SIZE
        assert self.pinned <= set(self.cache._ready)
        assert stats.unexpected_misses == 0
        assert self.source.doubled == 0
        assert self.cache.verify(deep=True) == []

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()
            assert self.cache.stats().resident_bytes == 0


Operations.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAnySequenceOfOperations = Operations.TestCase

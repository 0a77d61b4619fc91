"""Who goes first, and that finding it costs the same whatever the number of blocks."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everwarm.kv.chain import Key
from everwarm.kv.disk.directory import DirectoryStore
from everwarm.kv.eviction import worth
from everwarm.kv.index.recency import Recency
from everwarm.kv.index.tree import Node
from everwarm.kv.warm import others
from everwarm.kv.warm.blockstore import Blob, BlockStore
from kv.fake import BLOCK_TOKENS, model_ids, open_store, talk
from kv.simulated_disk import UnsyncedFiles, memory_directory


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


class Ranked(Recency):
    """Ranks by worth, as blocks on disk are."""

    def use(self, nodes: list[Node]) -> None:
        for node in nodes:
            self.touch(node, worth(node.named > 0, node.pinned > 0))

    def changed(self, node: Node) -> None:
        self.refile(node, worth(node.named > 0, node.pinned > 0))


def node(**fields: int) -> Node:
    return Node(Key(b""), None, **fields)  # type: ignore[arg-type]


def one(node: Node) -> int:
    return 1


def test_the_longest_unused_of_a_rank_goes_first() -> None:
    recency = Ranked()
    nodes = [node() for _ in range(5)]
    recency.use(nodes)
    recency.use([nodes[0]])
    assert recency.oldest(0, 3, one) == nodes[1:4]
    recency.discard(nodes[1])
    assert recency.oldest(0, 2, one) == nodes[2:4]
    assert (len(recency), nodes[1] in recency, nodes[2] in recency) == (4, False, True)


def test_as_much_goes_as_is_wanted_and_no_more() -> None:
    recency = Ranked()
    nodes = [node() for _ in range(9)]
    recency.use(nodes)
    weight = {id(each): number for number, each in enumerate(nodes)}
    assert recency.oldest(0, 4, lambda each: weight[id(each)]) == nodes[1:4]  # 1 + 2 + 3; the first weighs nothing
    assert recency.oldest(0, 1000, lambda each: weight[id(each)], 3) == nodes[1:4]


def test_a_node_is_in_the_queue_of_its_rank() -> None:
    recency = Ranked()
    nobody, named, pinned = node(), node(named=1), node(named=1, pinned=1)
    recency.use([pinned, named, nobody])
    assert [recency.oldest(rank, 9, one) for rank in range(3)] == [[nobody], [named], [pinned]]
    named.named = 0
    recency.changed(named)
    assert recency.oldest(0, 9, one) == [named, nobody]  # nobody owns it any more: the first to go
    pinned.pinned = 0
    recency.changed(pinned)
    assert recency.oldest(1, 9, one) == [pinned]
    recency.changed(node())  # not known: nothing happens
    assert len(recency) == 3


def test_a_busy_node_is_looked_at_once() -> None:
    recency = Ranked()
    nodes = [node() for _ in range(100)]
    recency.use(nodes)
    looked = []

    def unless_busy(one: Node) -> int:
        looked.append(one)
        return 0 if one in nodes[:50] else 1

    assert recency.oldest(0, 1, unless_busy) == [nodes[50]]
    assert len(looked) == 51
    looked.clear()
    assert recency.oldest(0, 1, unless_busy) == [nodes[50]]
    assert len(looked) == 1


@pytest.mark.parametrize("pinned", [False, True])
def test_memory_that_is_full_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: bool) -> None:
    store = open_store(tmp_path, files=UnsyncedFiles(), budget_blocks=600)
    for number in range(6):
        talk(store, f"agent {number}", [number] * 100 * BLOCK_TOKENS)
        store.pin(f"agent {number}", pinned)
    store.flush()
    assert store.index.pool.in_use == 600
    looked = 0
    may_cool = store.index._may_cool

    def counted(node: Node, forced: bool) -> bool:
        nonlocal looked
        looked += 1
        return may_cool(node, forced)

    monkeypatch.setattr(store.index, "_may_cool", counted)
    for _ in range(50):
        store.index.pool.drop([store.index.pool.allocate()])
        talk(store, "new", [7])
    assert looked < 1000  # not 600 for each
    store.close()


def test_a_quota_that_is_full_is_not_searched(tmp_path: Path) -> None:
    store = open_store(tmp_path, files=UnsyncedFiles())
    for number in range(6):
        talk(store, f"agent {number}", [number] * 100 * BLOCK_TOKENS)
    store.shared.quota = store.warm.bytes + store.shared.other_bytes
    looked = 0
    oldest = store.index.warm.oldest

    def counted(rank: int, wanted: int, weigh: Callable[[Node], int], most: int) -> list[Node]:
        nonlocal looked
        found = oldest(rank, wanted, weigh, most)
        looked += len(found)
        return found

    store.index.warm.oldest = counted  # type: ignore[assignment, method-assign]
    before = store.counters["warm_evictions"]
    for number in range(50):
        assert talk(store, f"new {number}", [1000 + number] * 3 * BLOCK_TOKENS).committed
    gone = store.counters["warm_evictions"] - before
    assert 150 <= gone == looked < 400
    assert store.warm.bytes + store.shared.other_bytes <= store.shared.quota
    store.close()


def test_other_models_are_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = open_store(tmp_path, ids=model_ids(weights="o" * 64), files=UnsyncedFiles())
    for number in range(40):
        talk(other, f"agent {number}", [number] * 5 * BLOCK_TOKENS)
    other.pin("agent 0")
    other.close()
    plans = 0
    victims = others.victims

    def counted(store: BlockStore, loaded: frozenset[str] = frozenset()) -> Iterator[tuple[Blob, int]]:
        nonlocal plans
        plans += 1
        return victims(store, loaded)

    monkeypatch.setattr(others, "victims", counted)
    store = open_store(tmp_path, files=UnsyncedFiles())
    store.shared.quota = store.warm.bytes + store.shared.other_bytes
    for number in range(20):
        assert talk(store, f"new {number}", [1000 + number] * 3 * BLOCK_TOKENS).committed
        assert store.warm.bytes + store.shared.other_bytes <= store.shared.quota
    assert plans == 1
    assert all(store.find(f"new {number}").chain()[0].on_disk for number in range(20))
    store.close()
    other = open_store(tmp_path, ids=model_ids(weights="o" * 64), files=UnsyncedFiles())
    assert all(node.on_disk for node in other.find("agent 0").chain())
    other.close()


@pytest.mark.parametrize("planned", ["before", "after"])
def test_what_is_quarantined_later_goes_first(tmp_path: Path, planned: str) -> None:
    """The plan is made on another thread, which may see it or not: it counts once."""
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "quarantine" / "old").write_bytes(bytes(100))
    models = others.OtherModels(DirectoryStore(tmp_path, UnsyncedFiles()))
    assert models.bytes == 100
    if planned == "before":
        models._make_plan()
    (tmp_path / "quarantine" / "new").write_bytes(bytes(50))
    models._make_plan() if planned == "after" else models.plan_ahead()
    models.quarantined(Blob("", "quarantine", "new"), 50)
    assert models.free(10) == 50
    assert (models.bytes, [path.name for path in (tmp_path / "quarantine").iterdir()]) == (100, ["old"])
    assert models.free(1000) == 100
    assert (models.bytes, models.free(1)) == (0, 0)

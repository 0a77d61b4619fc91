"""Several models of one process in one store, under one quota; and two stores at once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from everwarm.kv.store import AgentStore
from kv.audit import audit
from kv.fake import BLOCK_TOKENS, model_ids, open_store, talk
from kv.simulated_disk import UnsyncedFiles, memory_directory

OTHER = model_ids(weights="o" * 64)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


def opened(root: Path, **options: object) -> tuple[AgentStore, AgentStore]:
    first = open_store(root, files=UnsyncedFiles(), **options)
    second = open_store(root, ids=OTHER, files=UnsyncedFiles(), **options)
    assert (first.read_only, second.read_only) == ("", "")
    return first, second


def blocks(number: int, start: int) -> list[int]:
    return [start * 1000 + token for token in range(number * BLOCK_TOKENS)]


def test_two_models_save_side_by_side_and_find_their_own(tmp_path: Path) -> None:
    first, second = opened(tmp_path)
    for store, start in ((first, 1), (second, 2)):
        assert talk(store, "alice", blocks(3, start)).committed
        audit(store)
    first.close()
    assert talk(second, "alice", [*blocks(3, 2), 5]).committed  # the lock is still held
    third = open_store(tmp_path, files=UnsyncedFiles())
    assert third.read_only == ""
    assert talk(third, "alice", [*blocks(3, 1), 5]).cached_tokens == 3 * BLOCK_TOKENS
    third.close()
    second.close()
    first, second = opened(tmp_path)
    assert talk(first, "alice", [*blocks(3, 1), 5, 6]).cached_tokens == 3 * BLOCK_TOKENS + 1
    assert talk(second, "alice", [*blocks(3, 2), 5, 6]).cached_tokens == 3 * BLOCK_TOKENS + 1
    first.close()
    second.close()


def test_the_same_model_a_second_time_only_reads(tmp_path: Path) -> None:
    first, second = opened(tmp_path)
    talk(first, "alice", blocks(3, 1))
    again = open_store(tmp_path, files=UnsyncedFiles())
    assert "is writing in it for the same model" in again.read_only
    assert talk(again, "alice", [*blocks(3, 1), 9]).cached_tokens == 3 * BLOCK_TOKENS
    again.close()
    assert talk(second, "bob", blocks(2, 1)).committed
    first.close()
    second.close()


def test_the_quota_is_one_for_all_models_and_the_longest_unused_goes_whoever_has_it(tmp_path: Path) -> None:
    first, second = opened(tmp_path)
    assert first.warm is not None
    for number in range(4):
        talk(first, f"old {number}", blocks(3, number))
    for number in range(4):
        talk(second, f"new {number}", blocks(3, number))
    first.shared.quota = first.shared.used
    for number in range(4, 7):
        assert talk(second, f"new {number}", blocks(3, number)).committed
        assert first.shared.used <= first.shared.quota
        audit(first)
        audit(second)
    assert all(node.on_disk for agent in second.agents.all() for node in agent.chain())
    assert not all(node.on_disk for agent in first.agents.all() for node in agent.chain())
    saved = sum(path.stat().st_size for kind in ("blocks", "manifests") for path in tmp_path.glob(f"*/{kind}/*"))
    assert first.stats().warm_bytes + second.stats().warm_bytes == saved
    talk(first, "old 3", [*blocks(3, 3), 1])
    for number in range(7, 9):
        talk(second, f"new {number}", blocks(3, number))
    assert all(node.on_disk for node in first.find("old 3").chain())  # it was used later than some of the others
    first.close()
    second.close()


def test_pinned_agents_of_another_model_stay(tmp_path: Path) -> None:
    first, second = opened(tmp_path)
    talk(first, "pinned", blocks(3, 1))
    first.pin("pinned")
    talk(first, "free", blocks(3, 2))
    first.shared.quota = first.shared.used
    talk(second, "new", blocks(3, 1))
    assert all(node.on_disk for node in first.find("pinned").chain())
    assert not all(node.on_disk for node in first.find("free").chain())
    first.close()
    second.close()


def test_conversations_without_a_name_of_either_model_go_before_agents(tmp_path: Path) -> None:
    first, second = opened(tmp_path)
    talk(first, "named", blocks(3, 1))
    for number in range(3):
        talk(first, None, blocks(3, 10 + number))
    first.shared.quota = first.shared.used
    talk(second, "new", blocks(3, 1))
    assert all(node.on_disk for node in first.find("named").chain())
    audit(first)
    audit(second)
    first.close()
    second.close()


def test_two_directories_at_once(tmp_path: Path) -> None:
    one = open_store(tmp_path / "one", files=UnsyncedFiles())
    two = open_store(tmp_path / "two", files=UnsyncedFiles())
    assert (one.read_only, two.read_only) == ("", "")
    talk(one, "alice", blocks(3, 1))
    assert talk(two, "alice", [*blocks(3, 1), 1]).cached_tokens == 0
    one.close()
    assert talk(two, "alice", [*blocks(3, 1), 1, 2]).committed
    two.close()

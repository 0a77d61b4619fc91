"""The agent store on a fake model: tiers, sharing, eviction, restart."""

from pathlib import Path

import pytest

from everwarm.errors import CapacityError, StoreError, UnknownAgentError
from everwarm.kv.receipt import Receipt
from everwarm.types import Run
from kv.fake import BLOCK_TOKENS, CAPACITY, check, compute, model_ids, open_store, talk

HISTORY = list(range(100, 150))  # six full blocks and a partial one


def test_a_history_is_hot_after_its_turn_and_warm_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = talk(store, "alice", HISTORY, [7, 8])
    assert (first.tier, first.cached_tokens, first.committed, first.reason) == ("cold", 0, True, "no such agent")
    longer = [*HISTORY, 7, 8, 9, 10]
    hot = talk(store, "alice", longer)
    assert (hot.tier, hot.cached_tokens, hot.match) == ("hot", 51, "extended")
    store.close()
    store = open_store(tmp_path)
    warm = talk(store, "alice", [*longer, 11])
    assert (warm.tier, warm.cached_tokens, warm.match, warm.restored_blocks) == ("warm", 54, "extended", 7)
    store.close()
    assert store.index.pool.in_use == 0


def test_the_same_prompt_again_computes_one_token(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    talk(store, "alice", HISTORY, [1, 2, 3])
    again = talk(store, "alice", HISTORY, [1, 2, 3])
    assert (again.cached_tokens, again.match, again.reason) == (49, "exact", "exact")
    whole_blocks = HISTORY[: 4 * BLOCK_TOKENS]
    assert talk(store, "alice", whole_blocks).cached_tokens == len(whole_blocks) - 1
    store.close()


def test_a_changed_history_is_reused_up_to_the_change(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    talk(store, "alice", HISTORY)
    changed = [*HISTORY[:29], 5, *HISTORY[30:]]
    receipt = talk(store, "alice", changed)
    assert (receipt.cached_tokens, receipt.match, receipt.reason) == (29, "diverged", "diverged at token 29")
    store.close()
    store = open_store(tmp_path)
    assert talk(store, "alice", [*changed, 1]).cached_tokens == 50
    store.close()


def test_a_prompt_of_which_less_than_a_tenth_is_reused_is_cold(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    talk(store, "alice", HISTORY)
    few = talk(store, "bob", [*HISTORY[:4], *range(500, 541)])
    assert (few.tier, few.cached_tokens, few.prompt_tokens, few.match) == ("cold", 4, 45, "shared")
    enough = talk(store, "carol", [*HISTORY[:4], *range(600, 636)])
    assert (enough.tier, enough.cached_tokens, enough.prompt_tokens) == ("hot", 4, 40)
    assert store.index.counts.events["lookups_cold"] == 2
    store.close()


def test_evicted_is_warm_and_its_memory_is_free(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    talk(store, "alice", HISTORY)
    assert store.index.pool.in_use == 7
    assert store.evict("alice") == 7 * store.index.pool.block_bytes
    assert store.index.pool.in_use == 0
    assert talk(store, "alice", [*HISTORY, 1]).tier == "warm"
    store.close()


def test_equal_prefixes_are_kept_once_and_not_across_tenants(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    talk(store, "alice", HISTORY)
    shared = talk(store, "bob", [*HISTORY, 1, 2])
    assert (shared.cached_tokens, shared.match, shared.tier) == (50, "shared", "hot")
    assert store.index.pool.in_use == 8  # six full ones together, and an end for each
    other = talk(store, "alice", HISTORY, tenant="other")
    assert (other.cached_tokens, other.reason) == (0, "no such agent")
    store.close()


def test_a_fork_shares_everything_until_it_grows(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    talk(store, "alice", HISTORY)
    before = store.warm.bytes
    for number in range(20):
        store.fork("alice", f"copy {number}")
    assert store.index.pool.in_use == 7
    assert store.warm.bytes - before < 20 * 5000
    with pytest.raises(StoreError, match="exists already"):
        store.fork("alice", "copy 3")
    assert talk(store, "copy 3", [*HISTORY, 9]).cached_tokens == 50
    assert talk(store, "alice", [*HISTORY, 8]).cached_tokens == 50
    for number in range(20):
        store.delete(f"copy {number}")
    store.delete("alice")
    assert (store.index.pool.in_use, store.warm.bytes, list(tmp_path.glob("*/blocks/*"))) == (0, 0, [])
    store.close()


def test_under_a_small_budget_agents_go_to_disk_and_come_back(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget_blocks=10)
    histories = {f"agent {n}": [1000 * n + i for i in range(50)] for n in range(6)}
    for _ in range(3):
        for name, history in histories.items():
            histories[name] = [*history, 1]
            assert talk(store, name, histories[name]).cached_tokens in (0, len(history))
            assert store.index.pool.in_use <= 10
    assert store.counters["hot_evictions"] > 0
    store.close()


def test_a_sequence_larger_than_the_budget_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget_blocks=3)
    with store.open_turn("alice", CAPACITY) as turn:
        turn.acquire(HISTORY)
        with pytest.raises(CapacityError, match="--kv-budget"):
            compute(turn, HISTORY)
    store.flush()
    assert talk(store, "bob", HISTORY[:10]).committed
    store.close()
    assert store.index.pool.in_use == 0


def test_without_a_name_a_conversation_is_found_by_its_content(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = talk(store, None, HISTORY)
    assert first.agent.startswith("anonymous-")
    store.close()
    store = open_store(tmp_path)
    assert talk(store, None, [*HISTORY, 4]).cached_tokens == 50
    store.close()


def test_blocks_of_a_turn_that_was_not_committed_are_found_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with store.open_turn("alice", CAPACITY) as turn:
        turn.acquire(HISTORY)
        compute(turn, HISTORY)
    store.close()
    store = open_store(tmp_path)
    assert talk(store, "alice", HISTORY).cached_tokens == 48  # all full blocks
    store.close()


def test_quota_lets_anonymous_conversations_go_first_and_leaves_before_parents(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    file = store.warm.block_bytes
    store.shared.quota = 16 * file + 3 * 5000
    talk(store, "alice", HISTORY)
    talk(store, None, [5, *HISTORY])
    talk(store, "bob", [6, *HISTORY])
    assert store.warm.bytes <= store.shared.quota
    store.close()
    store = open_store(tmp_path)
    assert talk(store, "alice", [*HISTORY, 1]).cached_tokens == 50
    assert talk(store, "bob", [6, *HISTORY, 1]).cached_tokens == 51
    assert talk(store, None, [5, *HISTORY, 1]).cached_tokens < 48
    store.close()


def test_a_pinned_agent_stays(tmp_path: Path) -> None:
    store = open_store(tmp_path, budget_blocks=16)
    talk(store, "alice", HISTORY)
    store.pin("alice")
    store.shared.quota = 12 * store.warm.block_bytes
    for number in range(5):
        talk(store, f"agent {number}", [number, *HISTORY[:20]])
    assert talk(store, "alice", [*HISTORY, 1]).tier == "hot"
    store.close()
    store = open_store(tmp_path)
    assert talk(store, "alice", [*HISTORY, 2]).cached_tokens == 50
    store.close()


def test_another_process_reads_beside_the_one_that_writes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    talk(store, "alice", HISTORY)
    beside = open_store(tmp_path)
    assert "is writing in it" in beside.read_only
    receipt = talk(beside, "alice", [*HISTORY, 1])
    assert (receipt.cached_tokens, receipt.tier, receipt.committed) == (50, "warm", False)
    assert "is writing in it" in (receipt.error or "")
    with pytest.raises(StoreError, match="process"):
        beside.delete("alice")
    beside.close()
    assert talk(store, "alice", [*HISTORY, 1]).committed
    store.close()


def test_agents_of_another_model_are_named_in_the_reason(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    talk(store, "alice", HISTORY)
    store.close()
    for ids, reason in (
        (model_ids(weights="x" * 64), "other model"),
        (model_ids(numerics="y" * 64, kv_type="q8"), "other kv type"),
        (model_ids(numerics="z" * 64), "other numerics"),
    ):
        store = open_store(tmp_path, ids=ids)
        assert talk(store, "alice", HISTORY[:5]).reason.startswith(reason)
        store.delete("alice")
        store.close()


@pytest.mark.parametrize("name", ["", "a" * 300, "nul\0", "line\nfeed", "\ud800"])
def test_names_that_no_one_can_mean_are_refused(tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path)
    with pytest.raises(StoreError, match="name"):
        store.open_turn(name, CAPACITY)
    store.close()


@pytest.mark.parametrize("name", ["../../etc/passwd", "/", ".", "🦊", "a b", "*", "C:\\x"])
def test_any_other_name_is_only_a_name(tmp_path: Path, name: str) -> None:
    store = open_store(tmp_path / "store")
    talk(store, name, HISTORY)
    store.close()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    store = open_store(tmp_path / "store")
    assert talk(store, name, [*HISTORY, 1]).cached_tokens == 50
    store.close()


def test_files_are_private(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store")
    talk(store, "alice", HISTORY)
    store.close()
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_block_is_not_written_twice_and_old_ends_go(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    history = list(HISTORY)
    for turn in range(30):
        history.append(turn)
        talk(store, "alice", history)
    assert len(list(tmp_path.glob("*/blocks/*"))) == 10
    full = store.counters["saved_bytes"] / store.warm.block_bytes
    assert full == 10  # each full block once
    store.close()


def test_memory_only_store_keeps_agents_hot() -> None:
    store = open_store(None)
    talk(store, "alice", HISTORY)
    receipt = talk(store, "alice", [*HISTORY, 1])
    assert (receipt.tier, receipt.cached_tokens, receipt.committed) == ("hot", 50, False)
    store.close()


def test_a_turn_that_is_dropped_changes_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    talk(store, "alice", HISTORY)
    with store.open_turn("alice", CAPACITY) as turn:
        turn.acquire([*HISTORY, 1, 2, 3])
        compute(turn, [*HISTORY, 1, 2, 3])
    receipt = talk(store, "alice", [*HISTORY, 4])
    assert (receipt.match, receipt.cached_tokens) == ("extended", 50)
    with store.open_turn("alice", CAPACITY) as turn:
        turn.acquire([*HISTORY, 4, 5])
        check(turn, [*HISTORY, 4, 5])
    store.close()


def test_a_point_of_a_history_never_changes_and_others_go_on_from_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)

    def point(name: str, tokens: list[int], parent: str | None = None) -> Receipt:
        with store.open_turn(name, CAPACITY, parent=parent) as turn:
            turn.acquire(tokens)
            compute(turn, tokens)
            return turn.commit((Run("x", False, len(tokens)),), final=True, record={"number": len(tokens)})

    assert point("first", HISTORY).committed
    for name, more in (("left", [1]), ("right", [2])):
        receipt = point(name, [*HISTORY, *more], parent="first")
        assert (receipt.cached_tokens, receipt.match) == (len(HISTORY), "extended")
    with pytest.raises(StoreError, match="never changes"):
        store.open_turn("first", CAPACITY)
    with pytest.raises(UnknownAgentError):
        store.open_turn("new", CAPACITY, parent="nobody")
    assert "new" not in {name for _, name in store.agents.by_name}
    store.close()
    store = open_store(tmp_path)
    found = store.history(store.find("left"))
    assert (found.ids, found.record) == ([*HISTORY, 1], {"number": len(HISTORY) + 1})
    assert (store.find("left").final, store.find("left").anonymous, store.agents.by_text) == (True, True, {})
    store.fork("left", "copy")  # an agent like any other
    assert (store.find("copy").final, store.history(store.find("copy")).record) == (False, None)
    assert talk(store, "copy", [*HISTORY, 1, 7]).cached_tokens == len(HISTORY) + 1
    store.delete("first")
    assert point("later", [*HISTORY, 1, 5], parent="left").cached_tokens == len(HISTORY) + 1
    store.close()

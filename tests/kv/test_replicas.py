"""Several replicas on one prefix: each resumes what the others have saved, whatever the storage does."""

import random
import threading
from pathlib import Path

import pytest

from everwarm.errors import StoreError, TurnLostError
from everwarm.kv.manifest import text_digests
from everwarm.kv.receipt import Cause
from everwarm.kv.remote.cached import CachedStore
from everwarm.kv.store import AgentStore
from everwarm.kv.tools.export import export_agent
from everwarm.kv.tools.import_ import import_agent
from everwarm.kv.tools.verify import verify
from everwarm.types import Run
from kv.fake import BLOCK_TOKENS, CAPACITY, KINDS, compute, having, open_store, talk, warm
from kv.faulty_objects import FaultyObjects
from kv.replicas import objects_in_memory, replica
from kv.s3 import Server

HISTORY = list(range(100, 150))


@pytest.fixture
def objects() -> FaultyObjects:
    return FaultyObjects(objects_in_memory())


def place(store: AgentStore) -> CachedStore:
    found = warm(store).blocks.store
    assert isinstance(found, CachedStore)
    return found


def heal(*stores: AgentStore) -> None:
    """The breakers have had their rest."""
    for store in stores:
        place(store).remote.calls.breaker.succeeded()


def forget_copies(home: Path) -> None:
    """As another machine would be, which has no copies of blocks yet."""
    for path in home.glob("warm-cache/*/*/*/blocks/*"):
        path.unlink()


@pytest.mark.parametrize("kinds", KINDS)
def test_any_replica_resumes_any_agent(objects: FaultyObjects, tmp_path: Path, kinds: tuple[str, ...]) -> None:
    with having(*kinds), replica(objects, tmp_path) as one, replica(objects, tmp_path) as other:
        history = HISTORY
        for number in range(6):  # `talk` compares every byte of KV with what computing gives
            receipt = talk((one, other)[number % 2], "alice", history, [7, 8])
            assert receipt.committed
            assert (receipt.tier, receipt.cached_tokens) == (("warm", len(history) - 2) if number else ("cold", 0))
            history = [*history, 7, 8, 1000 + number]
        assert one.listed("default")[0].tokens == len(history) - 1 == other.listed("default")[0].tokens


def test_agents_share_what_they_have_in_common_across_replicas(objects: FaultyObjects, tmp_path: Path) -> None:
    with replica(objects, tmp_path) as one, replica(objects, tmp_path) as other:
        talk(one, "alice", HISTORY)
        other.find("alice")
        receipt = talk(other, "bob", [*HISTORY, 1])
        assert (receipt.cached_tokens, receipt.cause) == (len(HISTORY), Cause.SHARED)


def test_everything_that_changes_an_agent_works_from_any_replica(objects: FaultyObjects, tmp_path: Path) -> None:
    with replica(objects, tmp_path) as one, replica(objects, tmp_path) as other:
        talk(one, "alice", HISTORY)
        other.pin("alice")
        other.fork("alice", "bob")
        with pytest.raises(StoreError, match="exists already"):
            one.fork("alice", "bob")
        assert talk(one, "bob", [*HISTORY, 5]).cached_tokens == len(HISTORY)
        talk(one, "alice", [*HISTORY, 1])
        assert one.find("alice").pinned
        one.delete("bob")
        assert [agent.name for agent in other.listed("default")] == ["alice"]
        assert verify(place(one)).clean


def test_agents_move_between_stores_as_files(objects: FaultyObjects, tmp_path: Path) -> None:
    with replica(objects, tmp_path) as one:
        talk(one, "alice", HISTORY)
        export_agent(one, "alice", tmp_path / "file")
        local = open_store(tmp_path / "agents")
        import_agent(local, tmp_path / "file")
        assert talk(local, "alice", [*HISTORY, 1]).cached_tokens == len(HISTORY)
        export_agent(local, "alice", tmp_path / "back")
        local.close()
        import_agent(one, tmp_path / "back", "alice again")
        with replica(objects, tmp_path) as other:
            with pytest.raises(StoreError, match="exists already"):
                import_agent(other, tmp_path / "back", "alice again")
            assert talk(other, "alice again", [*HISTORY, 1, 2]).cached_tokens == len(HISTORY) + 1


def test_salts_and_secrets_are_the_same_everywhere_and_not_in_the_storage(
    objects: FaultyObjects, tmp_path: Path
) -> None:
    with replica(objects, tmp_path) as one, replica(objects, tmp_path) as other:
        talk(one, "alice", HISTORY, tenant="acme")
        assert one.secret("acme") == other.secret("acme") != one.secret("other")
        everything = b"".join(bytes(objects.get(found.name)[0]) for found in objects.list(""))
        cluster = place(one).secret
        assert cluster is not None
        for secret in (cluster, one.secret("acme")):
            assert secret not in everything
            assert secret.hex().encode() not in everything


def test_damage_in_the_cache_is_not_damage_in_the_storage(objects: FaultyObjects, tmp_path: Path) -> None:
    with replica(objects, tmp_path) as one, replica(objects, tmp_path) as other:
        talk(one, "alice", HISTORY)
        talk(other, "alice", [*HISTORY, 1])
        other.evict("alice")
        for path in place(other).cache._store.root.glob("*/blocks/*"):
            path.write_bytes(path.read_bytes()[:-1] + b"!")
        receipt = talk(other, "alice", [*HISTORY, 1, 2])
        assert (receipt.tier, receipt.cached_tokens) == ("warm", len(HISTORY) + 1)
        assert other.counters["corrupt"] == 0


def test_damage_in_the_storage_is_a_miss_and_is_mended_by_the_next_turn(objects: FaultyObjects, tmp_path: Path) -> None:
    with replica(objects, tmp_path) as one:
        talk(one, "alice", HISTORY)
    for found in list(objects.list("")):
        if "/blocks/" in found.name:
            data = bytes(objects.get(found.name)[0])
            objects.overwrite(found.name, data[:-1] + b"!")
    forget_copies(tmp_path)
    with replica(objects, tmp_path) as other:
        receipt = talk(other, "alice", [*HISTORY, 1])
        assert (receipt.cached_tokens, receipt.cause, receipt.reason) == (0, Cause.LOST, "checksum")
        assert receipt.committed
    forget_copies(tmp_path)
    with replica(objects, tmp_path) as third:
        assert talk(third, "alice", [*HISTORY, 1, 2]).cached_tokens == len(HISTORY) + 1


# The storage is away --------------------------------------------------------------------------------------------------


def test_without_storage_agents_go_on_and_are_saved_when_it_is_back(objects: FaultyObjects, tmp_path: Path) -> None:
    with replica(objects, tmp_path, read_s=0.5, write_s=0.5) as one:
        talk(one, "hot", HISTORY)
        talk(one, "warm", [1, *HISTORY])
        one.evict("warm")
        objects.away = "no route to host"
        hot = talk(one, "hot", [*HISTORY, 1])
        assert (hot.tier, hot.cached_tokens, hot.committed) == ("hot", len(HISTORY), False)
        assert "no route to host" in str(hot.error)
        disk = talk(one, "warm", [1, *HISTORY, 1])
        assert (disk.tier, disk.cached_tokens, disk.committed) == ("warm", len(HISTORY) + 1, False)
        again = talk(one, "hot", [*HISTORY, 1, 2])
        assert (again.cached_tokens, again.committed) == (len(HISTORY) + 1, False)
        objects.away = ""
        heal(one)
        assert one.histories.save_idle()  # what the thread does now and then
        with replica(objects, tmp_path) as other:
            assert talk(other, "hot", [*HISTORY, 1, 2, 3]).cached_tokens == len(HISTORY) + 2
            assert talk(other, "warm", [1, *HISTORY, 1, 2]).cached_tokens == len(HISTORY) + 2


def test_what_could_not_be_saved_is_saved_without_anybody_asking(objects: FaultyObjects, tmp_path: Path) -> None:
    with replica(objects, tmp_path, write_s=0.5) as one:
        assert one.resaving is not None
        one.resaving._first_s = 0.01
        talk(one, "alice", HISTORY)
        objects.away = "no route to host"
        assert not talk(one, "alice", [*HISTORY, 1]).committed
        resaving = one.resaving._thread
        assert resaving is not None
        objects.away = ""
        resaving.join()
        assert one.find("alice").unsaved is None


def test_the_next_turn_saves_as_well(objects: FaultyObjects, tmp_path: Path) -> None:
    with replica(objects, tmp_path, write_s=0.5) as one:
        talk(one, "alice", HISTORY)
        objects.away = "no route to host"
        assert not talk(one, "alice", [*HISTORY, 1]).committed
        objects.away = ""
        heal(one)
        receipt = talk(one, "alice", [*HISTORY, 1, 2])
        assert (receipt.committed, receipt.cached_tokens) == (True, len(HISTORY) + 1)


def test_what_others_have_saved_meanwhile_wins(objects: FaultyObjects, tmp_path: Path) -> None:
    """The turn that could not be saved has said so; the one that was saved is not overwritten."""
    with replica(objects, tmp_path, write_s=0.5) as one, replica(objects, tmp_path) as other:
        talk(one, "alice", HISTORY)
        objects.away = "no route to host"
        assert not talk(one, "alice", [*HISTORY, 1]).committed
        objects.away = ""
        heal(one, other)
        assert talk(other, "alice", [*HISTORY, 2, 3]).committed
        one.histories.save_idle()
        with one.open_turn("alice", CAPACITY) as turn:
            assert turn.history.ids == [*HISTORY, 2, 3]


def test_an_agent_of_which_nothing_is_here_is_a_miss_while_the_storage_is_away(
    objects: FaultyObjects, tmp_path: Path
) -> None:
    with replica(objects, tmp_path) as one:
        talk(one, "alice", HISTORY)
    with replica(objects, tmp_path, read_s=0.5) as other:
        other.find("alice")
        for blob in list(place(other).cache._sizes):
            place(other).cache.drop(blob)
        objects.away = "no route to host"
        receipt = talk(other, "alice", [*HISTORY, 1])
        assert (receipt.cached_tokens, receipt.committed) == (0, False)
        objects.away = ""


# Faults of all kinds --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_no_saved_turn_is_lost_or_saved_twice_whatever_the_storage_does(
    objects: FaultyObjects, tmp_path: Path, seed: int
) -> None:
    """Three replicas, four agents, calls that fail, responses that get lost, lists that are late: a turn that was
    acknowledged is the beginning of the next one, always.
    """
    objects.failing = objects.losing = 0.05
    objects.late = 5
    with (
        replica(objects, tmp_path) as one,
        replica(objects, tmp_path) as two,
        replica(objects, tmp_path, quota=20_000) as three,
    ):
        stores = (one, two, three)
        errors: list[BaseException] = []

        def live(agent: str, dice: random.Random) -> None:
            said: list[int] = [dice.randrange(50)]
            try:
                for number in range(25):
                    store = stores[dice.randrange(3)]
                    with store.open_turn(agent, CAPACITY) as turn:
                        known = turn.history.ids
                    assert known in ([], said), f"{agent}, turn {number}: another history than the last one"
                    longer = [*said, *range(dice.randrange(1, 2 * BLOCK_TOKENS)), number]
                    for _ in range(5):
                        try:
                            receipt = talk(store, agent, longer)
                        except TurnLostError:
                            continue
                        if receipt.committed:
                            said = longer
                            break
                        heal(*stores)
                    else:
                        raise AssertionError("five attempts were not saved")
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=live, args=(f"agent {number}", random.Random(10 * seed + number)))
            for number in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert objects.lost > 10


def test_slow_storage_makes_a_miss_and_no_one_waits_for_it(objects: FaultyObjects, tmp_path: Path) -> None:
    with replica(objects, tmp_path) as one:
        talk(one, "alice", HISTORY)
    hold = threading.Event()

    class SlowBlocks(FaultyObjects):
        def get(self, name, *args):  # type: ignore[no-untyped-def]
            if "/blocks/" in name:
                hold.wait()
            return super().get(name, *args)

    forget_copies(tmp_path)
    with replica(SlowBlocks(objects), tmp_path, read_s=0.05) as other:
        try:
            receipt = talk(other, "alice", [*HISTORY, 1])
        finally:
            hold.set()
        assert (receipt.cached_tokens, receipt.cause) == (0, Cause.LOST)
        assert "too slow" in receipt.reason
        assert receipt.committed


def test_replicas_on_s3(s3: Server, tmp_path: Path) -> None:
    from everwarm.kv.remote.objects import Bucket

    objects = Bucket.open(s3.new_bucket())
    with replica(objects, tmp_path) as one, replica(objects, tmp_path) as other:
        history = HISTORY
        for number in range(4):
            receipt = talk((one, other)[number % 2], "alice", history, [7])
            assert (receipt.committed, receipt.cached_tokens) == (True, len(history) - 2 if number else 0)
            history = [*history, 7, number]


# Conversations without a name -----------------------------------------------------------------------------------------


def test_the_same_conversation_without_a_name_on_two_replicas_is_saved_twice_without_harm(
    objects: FaultyObjects, tmp_path: Path
) -> None:
    with replica(objects, tmp_path) as one, replica(objects, tmp_path) as other:
        first, second = (talk(store, None, HISTORY, [7]) for store in (one, other))
        assert (first.committed, second.committed) == (True, True)
        assert first.agent == second.agent
        assert len(one.listed("default")) == 1


def test_a_branch_that_another_replica_has_continued_is_not_overwritten(objects: FaultyObjects, tmp_path: Path) -> None:
    def go_on(store: AgentStore, beginning: tuple[Run, ...], more: Run, tokens: list[int]) -> str:
        runs = (*beginning, more)
        with store.open_turn(None, CAPACITY, group="g") as turn:
            turn.continue_branch(text_digests(beginning))
            turn.acquire(tokens)
            compute(turn, tokens)
            assert turn.commit(runs).committed
            return turn.receipt.agent

    with replica(objects, tmp_path) as one, replica(objects, tmp_path) as other:
        begun = Run("a", True, 50)
        name = go_on(one, (), begun, HISTORY)
        other.listed("default")
        assert go_on(other, (begun,), Run("b", True, 1), [*HISTORY, 1]) == name
        assert go_on(one, (begun,), Run("c", True, 1), [*HISTORY, 2]) != name  # it knows the branch as it was
        assert sorted(agent.tokens for agent in other.listed("default")) == [51, 51]


def test_a_name_can_be_given_again_after_its_agent_was_removed(objects: FaultyObjects, tmp_path: Path) -> None:
    with replica(objects, tmp_path) as one, replica(objects, tmp_path) as other:
        talk(one, "alice", HISTORY)
        talk(one, "bob", HISTORY)
        one.delete("bob")
        other.fork("alice", "bob")
        assert talk(one, "bob", [*HISTORY, 1]).cached_tokens == len(HISTORY)
        one.delete("bob")
        export_agent(other, "alice", tmp_path / "file")
        import_agent(other, tmp_path / "file", "bob")
        assert talk(one, "bob", [*HISTORY, 1]).cached_tokens == len(HISTORY)

"""Power is lost after any operation on files while agents do what `test_power_loss.py` does not let them do: turns that
nobody waits for, exports that are taken in, agents that expire, damaged files that are moved to another directory.
"""

import errno
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kv import lives
from kv.crash import ROOT
from kv.hostile import HostileFiles, repeatable
from kv.lives import Setting
from kv.simulated_disk import memory_directory
from kv.world import World


@pytest.fixture
def world() -> Iterator[World]:
    with memory_directory() as path, repeatable(0) as reads:
        yield World(path, Setting(), reads)


@pytest.fixture
def hasty_world() -> Iterator[World]:
    """Nobody waits until a turn is saved."""
    with memory_directory() as path, repeatable(0) as reads:
        yield World(path, Setting(durability="async"), reads)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def talk(world: World, name: str | None, words: list[int], tenant: str = "default") -> None:
    world.begin(tenant, name, "", 0, "on", words)
    world.grow(-1, [7], 20)
    world.commit(-1, 20)
    world.check()


def test_turns_that_nobody_waits_for_survive_power_loss_once_they_are_acknowledged(hasty_world: World) -> None:
    world = hasty_world
    for turn in range(3):
        talk(world, "alice", [turn] * 9)
        talk(world, "bob", [turn] * 5)
        talk(world, None, [5] * 9)
        world.write(1 + turn)  # the writer is behind
        world.check()
    assert 0 < world.counts["acknowledged"] < world.counts["turns"]
    world.fork(1, "carol")  # waits, and with it all that came before
    world.check()
    assert world.counts["acknowledged"] == world.counts["turns"]
    talk(world, "carol", [6] * 9)
    talk(world, "carol", [7] * 9)
    world.restart()
    assert world.check_every_crash(subsets=2) > 150
    world.close()


@pytest.mark.parametrize("trust", [True, False])
def test_imports_survive_power_loss(world: World, trust: bool) -> None:
    talk(world, "alice", [1] * 20)
    world.export(0)
    world.import_(0, "default", "bob", trust=trust)
    world.import_(0, "other", "alice", trust=trust)
    world.check()
    talk(world, "bob", [2] * 9)
    world.delete(0)  # alice: bob may share her blocks
    world.import_(0, "default", "alice", trust=trust)
    world.check()
    assert world.counts["import"] == 3
    assert world.check_every_crash(subsets=2) > 100
    world.close()


@pytest.mark.parametrize("kind", ["create", "write", "sync", "close", "rename", "sync_directory"])
@pytest.mark.parametrize("nth", [1, 2, 4])
def test_an_import_that_is_refused_leaves_nothing_that_power_loss_could_bring_back(
    world: World, kind: str, nth: int
) -> None:
    talk(world, "alice", [1] * 20)
    world.export(0)
    world.files.arm(kind, nth, errno.EIO, lasting=False)
    world.import_(0, "default", "bob", trust=False)
    world.files.heal()
    world.check()
    assert world.counts["import refused"] == world.files.fired
    talk(world, "alice", [2] * 3)
    assert world.check_every_crash(subsets=1) > 30
    world.close()


def test_agents_that_expire_survive_power_loss_or_are_gone(world: World) -> None:
    talk(world, "alice", [1] * 20)
    talk(world, "bob", [1] * 12)  # shares a block with her
    talk(world, "carol", [2] * 9)
    world.pin(2, pinned=True)
    world.check()
    talk(world, "bob", [3] * 9)
    world.expire(2.5)  # alice only: bob has just spoken, carol is pinned
    world.check()
    assert sorted(name for _, name in world.view) == ["bob", "carol"]
    talk(world, "alice", [1] * 20)  # another one with her name
    world.expire(0.0)
    world.check()
    assert sorted(name for _, name in world.view) == ["carol"]
    assert world.check_every_crash(subsets=3) > 100
    world.close()


def test_agents_that_expire_when_a_store_is_opened_survive_power_loss_or_are_gone(world: World) -> None:
    talk(world, "alice", [1] * 20)
    talk(world, "bob", [1] * 12)
    for turn in range(6):
        talk(world, "carol", [turn] * 3)
    world.restart(most_age_s=4.0)
    world.check()
    assert sorted(name for _, name in world.view) == ["carol"]
    assert world.check_every_crash(subsets=2) > 100
    world.close()


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("deed", ["talk", "fork", "pin", "import", "delete"])
def test_what_follows_a_directory_sync_that_failed_does_not_rely_on_it(world: World, deed: str, nth: int) -> None:
    """The first sync of a change is that of the blocks, the second that of the manifests; of a removal it is the other
    way round. What the sync should have made safe may be gone, also after a later one has succeeded.
    """
    talk(world, "alice", [1] * 20)
    world.export(0)
    world.files.arm("sync_directory", nth, errno.EIO, lasting=False)
    match deed:
        case "talk":
            talk(world, "alice", [2] * 9)
        case "fork":
            world.fork(0, "bob")
        case "pin":
            world.pin(0, pinned=True)
        case "import":
            world.import_(0, "default", "bob", trust=False)
        case "delete":
            world.delete(0)
    world.check()
    assert world.files.fired == 1
    assert world.counts["acknowledged"] == 1
    world.files.heal()
    talk(world, "alice", [3] * 3)
    talk(world, "bob", [1] * 20)
    assert world.counts["acknowledged"] == 3
    assert world.check_every_crash(subsets=1) > 50
    world.close()


def test_damaged_blocks_that_are_moved_to_quarantine_are_never_served_after_power_loss(world: World) -> None:
    """The move is a rename from one directory to another: after a crash the file may have both names, or none."""
    talk(world, "alice", [1] * 20)
    talk(world, "bob", [1] * 9)
    for which in (4200, 4301, 4402):
        world.damage(which)
    world.evict(0)
    world.evict(1)
    world.warm_up(0)
    world.check()
    assert list((world.base / ROOT / "quarantine").iterdir())
    talk(world, "alice", [2] * 9)  # what is lost is computed again and saved under the old name
    talk(world, "bob", [2] * 9)
    world.restart()
    world.check()
    talk(world, "alice", [3] * 9)
    assert world.check_every_crash(subsets=3) > 60
    world.close()


class ForgetfulFiles(HostileFiles):
    """One kind of sync is never done."""

    forgotten = ""

    def sync(self, descriptor: int) -> None:
        if self.forgotten != "file":
            super().sync(descriptor)

    def sync_directory(self, path: Path) -> None:
        if path.name != self.forgotten:
            super().sync_directory(path)


@pytest.mark.parametrize("forgotten", ["file", "blocks", "manifests"])
@pytest.mark.parametrize("deed", ["import", "expire", "async"])
def test_the_simulation_notices_a_sync_that_is_forgotten(
    world: World, hasty_world: World, monkeypatch: pytest.MonkeyPatch, forgotten: str, deed: str
) -> None:
    world = hasty_world if deed == "async" else world
    talk(world, "alice", [1] * 20)
    world.export(0)
    world.restart()
    monkeypatch.setattr(ForgetfulFiles, "forgotten", forgotten)
    monkeypatch.setattr(lives, "HostileFiles", ForgetfulFiles)
    world.crash(0, power=True, seed=0)
    if deed == "import":
        world.import_(0, "default", "bob", trust=False)
    elif deed == "expire":
        world.expire(0.0)
        talk(world, "bob", [2] * 20)
    else:
        talk(world, "alice", [2] * 9)
        world.write(9)
    world.check()
    with pytest.raises(AssertionError):
        world.check_every_crash(subsets=0)


def test_an_expiry_leaves_nothing_that_could_come_back(world: World) -> None:
    talk(world, "alice", [1] * 20)
    assert [path for path in world.after_crash() if path.suffix == ".safetensors"]
    world.expire(0.0)
    assert not [path for path in world.after_crash() if path.suffix == ".safetensors"]
    world.close()

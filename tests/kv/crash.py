"""What may be left after power was lost at any moment of a recording, and whether that is what was promised."""

import random
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from everwarm.errors import StoreError
from everwarm.kv.chain import Key, child_key, token_bytes
from everwarm.kv.manifest import Manifest, decode
from everwarm.kv.store import AgentStore
from kv import fake
from kv.audit import audit
from kv.fake import BLOCK_TOKENS, CAPACITY, REACH
from kv.promises import Promises, found_in
from kv.simulated_disk import Operation, SimulatedDisk, Tree, UnsyncedFiles, build

ROOT = Path("home/agents")  # of the store; neither is there at first


@dataclass
class Moment:
    """Between two operations: what is on the disk, what was promised, and which blocks were deleted."""

    disk: SimulatedDisk = field(default_factory=SimulatedDisk)
    promises: Promises = field(default_factory=Promises)
    gone: set[Path] = field(default_factory=set)

    def after(self, log: Iterable[object]) -> "Moment":
        """The moment after these operations and marks. This one stays as it is."""
        then = Moment(self.disk.copy(), self.promises.copy(), set(self.gone))
        for one in log:
            if isinstance(one, Operation):
                then._do(one)
            else:
                then.promises.note(one)
        return then

    def _do(self, one: Operation) -> None:
        self.disk.do(one)
        if one.kind in ("unlink", "rename") and one.path.parent.name == "blocks":
            self.gone.add(one.path)
        if one.kind == "sync_directory":  # what was written again since is safe now
            self.gone = {path for path in self.gone if path.parent != one.path or path not in self.disk.safe}

    def left(self, share: float, chance: random.Random) -> Tree:
        """What is left if power is lost and this share of the changes survives that were on their way."""
        return self.disk.crash(lambda _: chance.random() < share, chance)

    def check_blocks(self, tree: Tree, damaged: set[str], *, deleted: bool) -> None:
        """A manifest on disk names blocks that are on disk; if some may be `deleted`, other than those at least."""
        excused = {key_of(path) for path in self.gone} | damaged if deleted else damaged
        for path, data in tree.items():
            if path.parent.name != "manifests" or path.suffix != ".safetensors" or data is None:
                continue
            try:
                manifest = decode(data)
            except StoreError as error:
                raise AssertionError(f"{path}: {error}") from None
            blocks = path.parents[1] / "blocks"
            seen = {
                number
                for position in manifest.positions
                for number in range(max(0, position + 1 - REACH) // BLOCK_TOKENS, -(-position // BLOCK_TOKENS))
            }
            needed = [blocks / f"{key.hex()}.safetensors" for key in manifest.blocks]
            if "window" in fake.apart:
                needed += [blocks / f"{manifest.blocks[number].hex()}.window.safetensors" for number in seen]
            if "state" in fake.apart:
                needed += [
                    blocks / f"{key.hex()}.state.safetensors"
                    for key in map(partial(_key_at, manifest), manifest.positions)
                ]
            for block in needed:
                assert block in tree or key_of(block) in excused, f"{path.name} names {block.name}, which is not there"


def _key_at(manifest: Manifest, position: int) -> Key:
    """The name of the block, perhaps one that a history has once ended with, that ends at a position."""
    number = -(-position // BLOCK_TOKENS) - 1
    parent = manifest.blocks[number - 1] if number else fake.model_ids().root(bytes.fromhex(manifest.salt))
    return child_key(parent, token_bytes(manifest.tokens[number * BLOCK_TOKENS : position]))


def key_of(path: Path) -> str:
    """The key that the file of a block, or of what lies beside it, is named after."""
    return path.name.split(".")[0]


@dataclass
class Lookout:
    """Looks at what crashes leave, each different state once."""

    directory: Path
    now: float  # the time when the store is opened
    deleted: bool  # whether blocks may have been deleted that a manifest on disk names
    damaged: set[str] = field(default_factory=set)  # blocks that were damaged on purpose
    seen: set[int] = field(default_factory=set)

    def look(self, moment: Moment, shares: Sequence[float], chance: random.Random) -> None:
        """Open what is left for each of these shares. Everything that was promised must be there."""
        for share in shares:
            tree = moment.left(share, chance)
            state = hash((frozenset(tree.items()), str(moment.promises)))
            if state not in self.seen:
                self.seen.add(state)
                moment.check_blocks(tree, self.damaged, deleted=self.deleted)
                self._open(tree, moment.promises)

    def _open(self, tree: Tree, promises: Promises) -> None:
        base = self.directory / "crashed"
        build(tree, base)
        store = fake.open_store(base / ROOT, files=UnsyncedFiles(), clock=lambda: self.now)
        assert not store.read_only
        promises.check(found_in(store))
        audit(store)
        check_kv(store)
        store.close()
        assert store.index.pool.in_use == 0
        shutil.rmtree(base)


def check_kv(store: AgentStore) -> None:
    """What every agent's next turn finds is what computing would have given."""
    for tenant, name in sorted(store.agents.by_name):
        with store.open_turn(name, CAPACITY, tenant) as turn:
            prompt = [*turn.history.ids, 1]
            turn.acquire(prompt)
            fake.check(turn, prompt)

"""A store, a disk that fails and loses power, and agents that do all that agents can do: one deed after the other.

After each deed everything is compared: every history with what was said, every count with what it counts (`kv.audit`),
every byte of KV that a turn finds with what computing would have given (`kv.fake`). Crashes are in `kv.lives`.

Who draws the deeds decides: `test_machine.py` lets hypothesis do it, `soak.py` a seeded random generator.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from everwarm.errors import CapacityError, StoreError
from everwarm.kv.manifest import text_digests
from everwarm.kv.tools.import_ import import_agent
from everwarm.kv.turn import Turn
from everwarm.types import Run
from kv import fake
from kv.crash import ROOT, key_of
from kv.fake import BLOCK_TOKENS, CAPACITY
from kv.hostile import FailingReads, SteppedWriter
from kv.lives import EXPORTS, Lives, OpenTurn, Setting
from kv.promises import ABSENT, Acknowledged, Born, Settled, State, Who, found_in, spelt
from kv.simulated_disk import Operation, UnsyncedFiles

LONGEST = 6 * BLOCK_TOKENS
MOST_TURNS = 3
One = TypeVar("One")


def pick(things: Sequence[One], number: int) -> One | None:
    """One of them, whatever the number is."""
    return things[number % len(things)] if things else None


class World(Lives):
    """Deeds that make no sense just now do nothing."""

    def __init__(self, directory: Path, setting: Setting, reads: FailingReads) -> None:
        super().__init__(directory, setting, reads)
        self._exports: list[tuple[Path, tuple[int, ...]]] = []

    # Turns ------------------------------------------------------------------------------------------------------------

    def begin(self, tenant: str, name: str | None, group: str, which: int, kind: str, words: Sequence[int]) -> None:
        """Open a turn and look up its prompt. Without a name it goes on from a branch, if there is one to choose."""
        if len(self.turns) >= MOST_TURNS or (name is not None and self._busy((tenant, name))):
            return
        turn = self.store.open_turn(name, CAPACITY, tenant, group=group)
        if name is None:
            self._go_on_from_a_branch(turn, which)
        known = list(turn.history.ids)
        state = ABSENT if turn.agent is None else self.view.get((tenant, turn.agent.name), ABSENT)
        assert (tuple(known), turn.history.lost) == (state.tokens, ""), f"{name}: not the history that it left behind"
        if len(known) > LONGEST or kind == "anew":
            known = []
        if kind == "edit" and known:
            known = known[: which % len(known)]
        prompt = known if kind == "again" and known else [*known, *words]
        one = OpenTurn(turn, list(prompt), len(prompt))
        self.turns.append(one)
        receipt = turn.acquire(prompt)
        fake.check(turn, prompt)
        self.counts["tokens found"] += turn.kv.length
        if self.undisturbed and self.setting.budget_blocks is None and self.setting.restore == "always":
            same = next((at for at, (a, b) in enumerate(zip(state.tokens, prompt, strict=False)) if a != b), len(known))
            assert receipt.cached_tokens >= min(same, turn.history.kv_tokens, len(prompt) - 1), receipt.reason

    def _go_on_from_a_branch(self, turn: Turn, which: int) -> None:
        beginning = f"{turn.group or 'anonymous'}-"
        branches = sorted(who for who in self.view if who[0] == turn.tenant and who[1].startswith(beginning))
        chosen = pick([None, *branches], which)
        if chosen is not None:
            state = self.view[chosen]
            turn.continue_branch(text_digests([Run(state.text, False, len(state.tokens))]))
            assert turn.agent is None or tuple(turn.history.ids) == state.tokens

    def grow(self, which: int, words: Sequence[int], chunk: int, *, slow: bool = False) -> None:
        """A turn goes on: tokens follow and are computed, but for the last."""
        one = pick([one for one in self.turns if not one.suspended], which)
        if one is None:
            return
        one.turn.computed(1, 1e3 if slow else 1e-9)
        one.turn.append(words)
        one.tokens += words
        self._compute(one, chunk)

    def suspend(self, which: int) -> None:
        one = pick([one for one in self.turns if not one.suspended], which)
        if one is not None:
            one.turn.suspend()
            one.suspended = True

    def resume(self, which: int) -> None:
        one = pick([one for one in self.turns if one.suspended], which)
        if one is not None:
            one.turn.resume()
            one.suspended = False
            fake.check(one.turn, one.tokens)

    def abandon(self, which: int) -> None:
        if (one := pick(self.turns, which)) is not None:
            self._end(one)

    def commit(self, which: int, chunk: int) -> None:
        one = pick([one for one in self.turns if not one.suspended], which)
        if one is None or not self._compute(one, chunk):
            return
        turn, fired, tokens = one.turn, self.files.fired, tuple(one.tokens)
        if turn.agent is None:
            state = State(tokens, anonymous=not turn.group)
            self.mark(Born(turn.tenant, state))
        else:
            before = self.view.get((turn.tenant, turn.agent.name), ABSENT)
            state = State(tokens, before.pinned, before.anonymous)
            number = self.begun((turn.tenant, turn.agent.name), state)
        nameless = turn.agent is None
        receipt = turn.commit((Run(spelt(tokens), False, len(tokens)),))
        who = turn.tenant, receipt.agent
        if self.undisturbed and receipt.committed and self.store.warm is not None:
            assert self.store.warm.blocks.load(*who).kv_tokens == len(one.computed), "KV was computed and is not saved"
        if nameless:
            state = State(tokens, self.view.get(who, ABSENT).pinned, state.anonymous)
            number = self.begun(who, state)
        self.view[who] = state
        self._end(one)
        self.saving(number, receipt, fired)
        self.counts["turns"] += 1

    def _compute(self, one: OpenTurn, chunk: int) -> bool:
        """What is to be computed of a turn. Without memory for it the turn ends, as an engine would end it."""
        try:
            fake.compute(one.turn, one.computed, chunk)
        except CapacityError:
            self.counts["turns without memory"] += 1
            self._end(one)
            return False
        fake.check(one.turn, one.tokens)
        return True

    def _end(self, one: OpenTurn) -> None:
        self.turns.remove(one)
        one.turn.release()

    # Agents -----------------------------------------------------------------------------------------------------------

    def fork(self, which: int, new: str) -> None:
        who = self._someone(which)
        if who is None or (who[0], new) in self.store.agents.by_name:
            return
        state = State(self.view[who].tokens)
        number = self.begun((who[0], new), state)
        with self.refusable("fork", (who[0], new)):
            self.store.fork(who[1], new, who[0])
            self.mark(Acknowledged(number))
            self.view[who[0], new] = state

    def pin(self, which: int, *, pinned: bool) -> None:
        who = self._someone(which)
        if who is None:
            return
        state = State(self.view[who].tokens, pinned, self.view[who].anonymous)
        number = self.begun(who, state)
        with self.refusable("pin"):
            self.store.pin(who[1], pinned, who[0])
            self.mark(Acknowledged(number))
            self.view[who] = state

    def delete(self, which: int) -> None:
        who = self._someone(which)
        if who is None:
            return
        number = self.begun(who, ABSENT)
        with self.refusable("delete", who):
            try:
                self.store.delete(who[1], who[0])
            finally:
                if who not in self.store.agents.by_name:  # it is gone, even if some of its blocks could not be deleted
                    self.mark(Acknowledged(number))
                    del self.view[who]

    def evict(self, which: int) -> None:
        """What was not saved yet is saved by it."""
        if (who := self._someone(which)) is not None:
            with self.refusable("evict"):
                self.store.evict(who[1], who[0])
                self.mark(Settled(who, self.view[who]))

    def warm_up(self, which: int) -> None:
        if (who := pick(sorted(self.view), which)) is not None:
            warmed = self.store.warm_up(who[1], who[0])
            assert warmed.cached_tokens <= len(self.view[who].tokens)

    def export(self, which: int) -> None:
        """To another machine: the file is safe from what happens here."""
        if (who := pick(sorted(self.view), which)) is None:
            return
        path = self.base / EXPORTS / str(next(self._numbers))
        kept = self.directory / f"export {path.name}"
        with self.refusable("export"):
            try:
                fake.export_agent(self.store, who[1], path, who[0])
            except StoreError as error:
                if f"{path}: may vanish" in str(error):  # the disk has refused to sync, then to remove: it is told
                    path.unlink()
                raise
            shutil.move(path, kept)
            self.files.mark(Operation("unlink", path.relative_to(self.base)))
            self._exports.append((kept, self.view[who].tokens))
        assert not path.exists(), "an export that was refused is there"

    def import_(self, which: int, tenant: str, new: str, *, trust: bool) -> None:
        chosen = pick(self._exports, which)
        if chosen is None or (tenant, new) in self.store.agents.by_name:
            return
        path, tokens = chosen
        number = self.begun((tenant, new), State(tokens))
        with self.refusable("import", (tenant, new)):
            import_agent(self.store, path, new, tenant, trust=trust)
            self.mark(Acknowledged(number))
            self.view[tenant, new] = State(tokens)

    def expire(self, age: float) -> None:
        """Remove agents that were not used for so long."""
        before = self.now - age
        old = [
            (who, self.begun(who, ABSENT))
            for who, state in sorted(self.view.items())
            if not (state.pinned or self._busy(who)) and self.store.agents.by_name[who].used < before
        ]
        fired = self.files.fired
        self.store.expiry.remove_unused_since(before)
        for who, number in old:
            if who not in self.store.agents.by_name:
                self.mark(Acknowledged(number))
                del self.view[who]
            else:
                assert self.files.fired > fired or self.store.read_only, f"{who} is old and still there"

    # The machine ------------------------------------------------------------------------------------------------------

    def write(self, jobs: int) -> None:
        """The writer does some of its jobs."""
        assert isinstance(self.store.writer, SteppedWriter)
        for _ in range(jobs):
            self.store.writer.step()

    def fail_reads(self, count: int, error: int) -> None:
        """The next blocks can't be read, though nothing is wrong with their files."""
        self.reads.left, self.reads.error = count, error
        self.files.fired += count

    def damage(self, which: int) -> None:
        """A byte of a block's file changes."""
        path = pick(sorted((self.base / ROOT).glob("*/blocks/[!.]*")), which)
        if path is not None:
            data = bytearray(path.read_bytes())
            data[which % len(data)] ^= 1
            path.write_bytes(data)
            self.files.mark(Operation("damage", path.relative_to(self.base), data=bytes(data)))
            self.damaged.add(key_of(path))

    def look(self) -> None:
        """Another process reads beside this one."""
        reader = fake.open_store(self.base / ROOT, writing=False, files=UnsyncedFiles())
        try:
            self._promises.check(found_in(reader))
        finally:
            reader.close()

    def _someone(self, which: int) -> Who | None:
        """An agent that nobody talks to."""
        return pick([who for who in sorted(self.view) if not self._busy(who)], which)

    def _busy(self, who: Who) -> bool:
        agent = self.store.agents.by_name.get(who)
        return agent is not None and agent.talks

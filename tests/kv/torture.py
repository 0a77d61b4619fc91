"""Agents that talk, in processes that are killed: `python tests/kv/torture.py CYCLES [--seed N] [--model hybrid]`.

A cycle is the life of one process. It opens the store that its predecessor has left, tells what is in it, talks as
three agents (and as copies of them), and is ended at a random instant by SIGKILL; now and then it closes the store and
ends by itself. Before each change it says which history the change will leave, and after it that the change is
acknowledged (the last event of the turn says `committed`; with durability `async`: says so after a flush). Its parent
keeps book:

- an agent has the history that was acknowledged last, or one that was begun after that;
- every answer has the tokens and log-probabilities of a run without any cache on the same token ids;
- nothing in the store is corrupt, and nobody but the living process holds its lock.

In a part of the lives, system calls that change files fail now and then, for a while. Then a turn may be answered and
not saved, and a fork or a removal may be refused; nothing else changes. Before a life ends by itself its disk is well
again, so everything that it has said is there afterwards, and nothing of what was refused.

Most lives are forked from a process that has imported everwarm's modules and opened nothing: no file, no lock, no
thread. What a fresh interpreter would add is a second of imports; what a crash destroys and a restart must find again
(buffers, threads, descriptors, the lock) exists only in the life itself, and a fork inherits none of it. Every 30th
life is a fresh interpreter, so that nothing hangs on this argument.
"""

import argparse
import errno
import hashlib
import json
import logging
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # else importing NumPy starts threads, and a fork leaves them behind
sys.path.insert(0, str(Path(__file__).parents[1]))

import everwarm
from everwarm.errors import StoreError
from everwarm.kv import container
from everwarm.kv import store as store_module
from everwarm.kv.disk.files import Files
from everwarm.llm import LLM, End, Event
from everwarm.setting_kinds import PREFIX
from everwarm.text.history import tokenise, wanted_runs
from golden.oracles.cases import CASES
from tiny import Tiny

AGENTS = ["alice", "bob", "carol"]
COPY = "dave"
CONTEXT = 512
FRESH_EVERY = 30


def write_tiny(path: Path) -> None:
    """A layer of attention."""
    Tiny(layers=1, width=64, heads=2, kv_heads=1, head_dim=32, ffn=64, context=CONTEXT).write(path)


def write_hybrid(path: Path) -> None:
    """Layers with a state, and one of attention."""
    (case,) = [case for case in CASES if case.name == "qwen35"]
    case.unpack(path.parent).rename(path)


MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "tiny": (write_tiny, "160KiB"),
    "hybrid": (write_hybrid, "1MiB"),
}
"""How each is written, and a KV budget that is soon full."""


@dataclass(frozen=True)
class Plan:
    """What one life is to do."""

    model: str
    seed: int
    durability: str
    kv_budget: str
    turns: int | None  # None: until it is killed
    sync_s: float  # that a sync takes longer than it does here: what must be waited for is not done by itself
    exit: str  # killed, close (the store is closed), exit (the interpreter ends, nobody closes), term (SIGTERM)
    restore: str = "always"
    faults: float = 0.0  # the share of system calls that fail while the disk is unwell


class UnwellFiles(Files):
    """System calls of which a share fails."""

    share = 0.0
    sync_s = 0.0
    may_sync = threading.Event()  # until then, syncs wait
    may_sync.set()
    failed = 0
    draw = random.Random()

    def create(self, path: Path) -> int:
        self._may_fail()
        return super().create(path)

    def write(self, descriptor: int, parts: Sequence[memoryview]) -> int:
        self._may_fail()
        return super().write(descriptor, parts)

    def sync(self, descriptor: int) -> None:
        time.sleep(self.sync_s)
        self.may_sync.wait()
        self._may_fail()
        super().sync(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        self._may_fail()
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._may_fail()
        super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        self._may_fail()
        super().sync_directory(path)

    @classmethod
    def _may_fail(cls) -> None:
        if cls.share and cls.draw.random() < cls.share:
            cls.failed += 1
            error = cls.draw.choice([errno.EIO, errno.ENOSPC])
            raise OSError(error, os.strerror(error))


class Life:
    """One process with the store. Everything that it says goes through `out`, a line at a time."""

    def __init__(self, plan: Plan, out: int) -> None:
        self.plan = plan
        self.out = out
        self.draw = random.Random(plan.seed)
        self.llm: LLM = everwarm.load(
            plan.model, threads=1, warm="on", durability=plan.durability, kv_budget=plan.kv_budget, restore=plan.restore
        )
        self.store = self.llm.agents
        self.unacknowledged: list[tuple[int, Any]] = []
        self.number = 0

    def live(self) -> None:
        if self.store.read_only or self.store.warm.quarantine.count or self.store.counters["corrupt"]:
            self.say(wrong=f"store: {self.store.read_only!r}, {self.store.warm.quarantine.count} files in quarantine")
        for name in [*AGENTS, COPY]:
            self.say(found=name, ids=self.history(name))
        count = 0
        while self.plan.turns is None or count < self.plan.turns - 1:
            if self.plan.faults and self.draw.random() < 0.3:
                UnwellFiles.share = self.draw.choice([0.0, self.plan.faults])
            self.act(self.draw.choice(AGENTS))
            count += 1
        UnwellFiles.share = 0.0
        if self.plan.durability == "async":  # the last turn is still on its way to the disk when the process ends
            UnwellFiles.may_sync.clear()
        name = self.draw.choice(AGENTS)
        self.talk(name, self.history(name) or [], last=True)

    def act(self, name: str) -> None:
        deed = self.draw.random()
        known = self.history(name)
        copy = self.history(COPY)
        if deed < 0.05 and known is not None and copy is None:
            self.change(self.begin(COPY, known), lambda: self.store.fork(name, COPY))
        elif deed < 0.08 and copy is not None:
            self.change(self.begin(COPY, None), lambda: self.delete(COPY))
        elif deed < 0.15 and known is not None:
            self.change(None, lambda: self.store.evict(name))
        elif deed < 0.25 and copy is not None:
            self.talk(COPY, copy)
        else:
            self.talk(name, known or [])

    def change(self, number: int | None, change: Callable[[], object]) -> None:
        """It may be refused if the disk is unwell."""
        failed = UnwellFiles.failed
        try:
            change()
            if number is not None:
                self.say(acknowledged=number)
        except StoreError as error:
            if UnwellFiles.failed == failed:
                self.say(wrong=f"refused: {error}")
            self.say(refused=number)

    def delete(self, name: str) -> None:
        """An agent may be gone although some of its blocks could not be deleted."""
        try:
            self.store.delete(name)
        except StoreError:
            if ("default", name) in self.store.agents.by_name:
                raise

    def talk(self, name: str, known: list[int], *, last: bool = False) -> None:
        """One turn: as chat messages for alice, as token ids for the others. After the last one comes nothing."""
        sampling: dict[str, Any] = {"temperature": 0.0}
        if self.draw.random() < 0.5:
            sampling = {"temperature": 0.9, "seed": self.draw.randrange(1000)}
        options = {"max_tokens": self.draw.randrange(2, 20), "top_logprobs": 2, "ignore_eos": self.draw.random() < 0.7}
        if name == "alice":
            asked, prompt = self.messages(known)
        else:
            prompt = self.prompt(known)
            asked = {"tokens": prompt}
        self.say(asked=name, tokens=len(prompt))
        events: list[Event] = []
        stop_after = self.draw.randrange(1, 6) if self.draw.random() < 0.1 and not last else None
        stream = self.llm.stream(**asked, **options, **sampling, agent=name)
        for event in stream:
            if isinstance(event, End):
                receipt = event.receipt
                continue
            events.append(event)
            if stop_after == len(events):
                stream.close()  # the client is gone: nothing of this turn counts
                return
            if event.finish_reason:
                number = self.begin(name, [*prompt, *(event.token for event in events)])
        if receipt.tokens_digest != hashlib.blake2b(as_bytes(prompt), digest_size=16).hexdigest():
            self.say(wrong=f"{name}: the turn had other token ids than it should have had")
        if self.plan.durability == "turn":
            self.saved(number, receipt)
        else:
            self.unacknowledged.append((number, receipt))
            if self.draw.random() < 0.3 and not last:
                self.flush()
        unfinished = receipt.cached_tokens > shared(known, prompt) or None
        self.say(turn=receipt.tier, unfinished=unfinished, match=receipt.match)
        if not last and (receipt.tier != "hot" or self.draw.random() < 0.3):
            self.compare(name, prompt, events, options | sampling)

    def compare(self, name: str, prompt: list[int], events: list[Event], options: dict[str, Any]) -> None:
        """With an answer without any cache."""
        alone = [event for event in self.llm.stream(tokens=prompt, cache=False, **options) if isinstance(event, Event)]
        if [said(event) for event in alone] != [said(event) for event in events]:
            self.say(wrong=f"{name}: {len(prompt)} tokens: another answer than without a cache", kind="wrong answers")
        self.say(compared=len(events))

    def flush(self) -> None:
        self.store.flush()
        for number, receipt in self.unacknowledged:
            self.saved(number, receipt)
        self.unacknowledged = []

    def saved(self, number: int, receipt: Any) -> None:
        if receipt.committed:
            self.say(acknowledged=number)
        elif UnwellFiles.failed:
            self.say(unsaved=number)
        else:
            self.say(wrong=f"not saved: {receipt.error}")

    def begin(self, name: str, ids: list[int] | None) -> int:
        self.number += 1
        self.say(begun=self.number, agent=name, ids=ids)
        return self.number

    def history(self, name: str) -> list[int] | None:
        agent = self.store.agents.by_name.get(("default", name))
        return None if agent is None else self.store.history(agent).ids

    def prompt(self, known: list[int]) -> list[int]:
        """What may follow a history: more of it, the same again, another middle, something else."""
        chance = self.draw.random()
        if len(known) > CONTEXT - 100 or not known:
            return self.words(10, 150)
        if chance < 0.1:
            return known
        if chance < 0.25:
            known = known[: self.draw.randrange(len(known))]
        return known + self.words(1, 70)

    def messages(self, known: list[int]) -> tuple[dict[str, Any], list[int]]:
        said = list(self.llm.conversation("alice")) if known else []
        if len(known) > CONTEXT - 150:
            said = []
        elif said and self.draw.random() < 0.15:
            said = said[: 2 * self.draw.randrange(1 + len(said) // 2)]
        words = bytes(self.words(1, 50)).decode("latin-1")
        messages = [*said, {"role": "user", "content": words}]
        history = self.store.history(self.store.agents.by_name["default", "alice"]) if known else None
        segments, add_bos = self.llm.segments(messages=messages)
        runs, ids = (history.runs, history.ids) if history else ((), [])
        return {"messages": messages}, tokenise(self.llm.tokenizer, wanted_runs(segments, add_bos), runs, ids).ids

    def words(self, least: int, most: int) -> list[int]:
        """Few different letters, so that agents meet in the same words."""
        return [self.draw.choice(b"ab ") for _ in range(self.draw.randint(least, most))]

    def say(self, **line: Any) -> None:
        os.write(self.out, json.dumps(line, separators=(",", ":")).encode() + b"\n")


def shared(known: list[int], prompt: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(known, prompt, strict=False)) if a != b), len(known))


def as_bytes(ids: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "big") for token in ids)


def said(event: Event) -> tuple[Any, ...]:
    return event.token, event.text, event.logprob, event.top_logprobs, event.finish_reason


def live(plan: Plan, out: int) -> None:
    """All of a process's life, but for its end."""
    if plan.exit == "term":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # as the command line does
    UnwellFiles.sync_s, UnwellFiles.draw = plan.sync_s, random.Random(plan.seed)
    logging.disable(logging.ERROR if plan.faults else logging.NOTSET)  # each fault is a line
    store_module.Files = UnwellFiles  # what a store is opened with
    life = Life(plan, out)
    life.live()
    life.say(unsafe=sum(receipt.committed is None for _, receipt in life.unacknowledged))
    UnwellFiles.may_sync.set()
    if plan.exit == "close":
        life.llm.close()
    if plan.exit == "term":
        os.kill(os.getpid(), signal.SIGTERM)


class Book:
    """What was acknowledged, and what was begun after that."""

    def __init__(self) -> None:
        self.acknowledged: dict[str, list[int] | None] = {}
        self.begun: dict[str, list[tuple[int, list[int] | None]]] = {}
        self.refused: dict[str, list[list[int] | None]] = {}  # a crash may leave what could not be undone
        self.counts: Counter[str] = Counter({"wrong answers": 0, "lost acknowledged turns": 0})
        self.wrong: list[str] = []

    def note(self, line: dict[str, Any]) -> None:
        match line:
            case {"wrong": words}:
                self.wrong.append(words)
                self.counts[line.get("kind", "other errors")] += 1
            case {"found": name, "ids": ids}:
                later = [history for _, history in self.begun.get(name, [])]
                self.counts["histories found"] += 1
                if ids == self.acknowledged.get(name):
                    pass
                elif ids in later:
                    self.counts["found one that was not acknowledged"] += 1
                elif ids in self.refused.get(name, []):
                    self.counts["found one that was refused"] += 1
                else:
                    kept = self.acknowledged.get(name)
                    self.wrong.append(f"{name}: acknowledged {kept}, later begun {later}, found {ids}")
                    self.counts["lost acknowledged turns"] += 1
                self.acknowledged[name], self.begun[name], self.refused[name] = ids, [], []
            case {"begun": number, "agent": name, "ids": ids}:
                self.begun.setdefault(name, []).append((number, ids))
            case {"acknowledged": number}:
                self.counts["acknowledged"] += 1
                for name, begun in self.begun.items():
                    for at, (found, ids) in enumerate(begun):
                        if found == number:
                            self.acknowledged[name], self.begun[name] = ids, begun[at + 1 :]
                            break
            case {"refused": number}:
                self.counts["refused"] += 1
                for name, begun in self.begun.items():
                    self.refused.setdefault(name, []).extend(ids for found, ids in begun if found == number)
                    self.begun[name] = [one for one in begun if one[0] != number]
            case {"unsaved": _}:
                self.counts["turns that were not saved"] += 1
            case {"turn": tier, "unfinished": unfinished}:
                self.counts[f"{tier} turns"] += 1
                self.counts["reused blocks of turns that nobody owns"] += bool(unfinished)
            case {"unsafe": turns}:
                self.counts["turns on their way to the disk at the end"] += turns
            case {"compared": tokens}:
                self.counts["tokens compared"] += tokens

    def all_acknowledged(self) -> None:
        """The process ended by itself: whatever it has begun is there."""
        for name, begun in self.begun.items():
            if begun:
                self.acknowledged[name] = begun[-1][1]
            self.begun[name], self.refused[name] = [], []


def run_life(plan: Plan, book: Book, kill_after_s: float | None, fresh: bool) -> None:
    """Start a process, listen to it, kill it when its time has come."""
    read, write = os.pipe()
    if fresh:
        command = [sys.executable, __file__, "--life", json.dumps(asdict(plan)), "--out", str(write)]
        process = subprocess.Popen(command, pass_fds=[write])
        pid = process.pid
    else:
        pid = os.fork()
        if pid == 0:
            os.close(read)
            _forked(plan, write)
    os.close(write)
    deadline = None if kill_after_s is None else time.monotonic() + kill_after_s + (0.5 if fresh else 0)
    rest = b""
    while True:
        wait = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([read], [], [], wait)[0]:
            os.kill(pid, signal.SIGKILL)
            deadline = None
            continue
        data = os.read(read, 1 << 16)
        if not data:
            break
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            book.note(json.loads(line))
    os.close(read)
    status = process.wait() if fresh else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    expected = {"close": 0, "exit": 0, "term": 143}.get(plan.exit, -signal.SIGKILL)
    if status != expected:
        book.wrong.append(f"the process ended with {status}, expected {expected}: {plan}")
    if plan.exit != "killed":
        book.all_acknowledged()


def _forked(plan: Plan, out: int) -> None:
    """Never returns. Ends as an interpreter does where that matters: what is registered for the end is called."""
    import atexit

    code = 1
    try:
        live(plan, out)
        code = 0
    except SystemExit as end:
        code = int(str(end.code or 0))
    except BaseException as error:
        import traceback

        traceback.print_exc()
        os.write(out, json.dumps({"wrong": repr(error)}).encode() + b"\n")
    finally:
        atexit._run_exitfuncs()
        os._exit(code)


def check_files(home: Path) -> int:
    """Every file in the store is whole. Returns how many there are."""
    files = [path for path in (home / "agents").rglob("*.safetensors") if not path.name.startswith(".")]
    for path in files:
        container.decode(path.read_bytes())
    return len(files)


def torture(cycles: int, seed: int, home: Path, which: str = "tiny") -> Counter[str]:
    """Raises AssertionError, with all that was wrong, after the first cycle in which something was."""
    home.mkdir(parents=True, exist_ok=True)
    os.environ[PREFIX + "HOME"] = str(home)
    model, (write, small_budget) = home / "model.gguf", MODELS[which]
    write(model)
    book = Book()
    for cycle in range(cycles):
        draw = random.Random(1_000_003 * seed + cycle)
        ending = draw.choices(["killed", "close", "exit", "term"], [0.88, 0.04, 0.04, 0.04])[0] if cycle else "close"
        plan = Plan(
            str(model),
            draw.randrange(1 << 30),
            draw.choices(["turn", "async"], [0.75, 0.25])[0],
            draw.choices(["64MiB", small_budget], [0.75, 0.25])[0],
            None if ending == "killed" else draw.randrange(1, 6),
            draw.choice([0, 0, 0.005]),
            ending,
            draw.choice(["always", "auto"]),
            draw.choice([0.0, 0.0, 0.02, 0.2]),
        )
        fresh = cycle % FRESH_EVERY == FRESH_EVERY - 1
        run_life(plan, book, draw.uniform(0, 0.25) if ending == "killed" else None, fresh)
        book.counts["cycles"] += 1
        book.counts[ending] += 1
        book.counts["fresh interpreters"] += fresh
        book.counts["lives with faults"] += plan.faults > 0
        book.counts[f"restore {plan.restore}"] += 1
        if cycle % 10 == 0:
            book.counts["files read whole"] += check_files(home)
        assert not book.wrong, f"seed {seed}, cycle {cycle}, {plan}, store in {home}: " + "; ".join(book.wrong)
    return book.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cycles", type=int, nargs="?", default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--life", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.life:
        live(Plan(**json.loads(given.life)), given.out)
        return
    directory = Path(tempfile.mkdtemp(prefix="everwarm-torture-"))
    started = time.monotonic()
    counts = torture(given.cycles, given.seed, directory / "home", given.model)
    shutil.rmtree(directory)
    print(
        f"{counts['cycles']} cycles, {counts['killed']} kills, {counts['wrong answers']} wrong answers, "
        f"{counts['lost acknowledged turns']} lost acknowledged turns, {time.monotonic() - started:.0f} s",
        file=sys.stderr,
    )
    print(json.dumps(counts))


if __name__ == "__main__":
    main()

"""Replicas that are killed and frozen at random, on one prefix of an S3 server: no acknowledged turn gets lost.

    python tests/kv/replica_torture.py CYCLES [SEED]

Some processes talk as a few agents, each turn longer than the last acknowledged one. They write to a pipe what was
acknowledged. In mid-turn one of them is killed (SIGKILL), or frozen (SIGSTOP) for longer than its lease and woken.
Their clocks differ by minutes. For every second one, 5 % of the calls to the storage fail, 5 % lose their response
after the work was done, all are slow, and lists are late.
After each turn, what the storage has is compared: it is the last acknowledged history of the agent, or one that was
begun since. KV is compared byte by byte by `kv.fake.talk`.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

AGENTS = 4
LEASE_S = 0.5


def work(url: str, home: str, seed: int) -> None:
    """A replica: for each line (agent, history, tokens to add) of its input, one turn and one line of output."""
    from everwarm.errors import TurnLostError
    from everwarm.kv.remote.objects import Bucket
    from everwarm.kv.remote.opening import open_warm
    from kv.fake import open_store, talk
    from kv.faulty_objects import FaultyObjects
    from kv.replicas import leases

    objects = FaultyObjects(Bucket.open(url), seed)
    place = open_warm(url, Path(home), 1 << 20, objects=objects)
    store = open_store(place, quota=place.free_bytes())
    leases(store)._duration_s = LEASE_S
    skew_s = random.Random(seed).uniform(-300, 300)
    leases(store)._clock = lambda: time.time() + skew_s
    if seed % 2:
        objects.failing = objects.losing = 0.05
        objects.late, objects.delay_s = 5, 0.002
    print("ready", flush=True)
    for line in sys.stdin:
        agent, tokens = json.loads(line)
        try:
            receipt = talk(store, agent, tokens)
            print(json.dumps([bool(receipt.committed), receipt.cached_tokens]), flush=True)
        except TurnLostError:
            print(json.dumps([False, 0]), flush=True)


class Replica:
    """One of the processes."""

    def __init__(self, url: str, home: Path, seed: int) -> None:
        command = [sys.executable, __file__, "--work", url, str(home), str(seed)]
        self._process: Any = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline() == "ready\n"

    def ask(self, agent: str, tokens: list[int]) -> None:
        self._process.stdin.write(json.dumps([agent, tokens]) + "\n")
        self._process.stdin.flush()

    def answer(self) -> list[Any] | None:
        line = self._process.stdout.readline()
        found: list[Any] | None = json.loads(line) if line else None
        return found

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def torture(url: str, home: Path, cycles: int, seed: int) -> dict[str, int]:
    dice = random.Random(seed)
    numbers = count(100 * seed)
    replicas = [Replica(url, home, next(numbers)) for _ in range(3)]
    said: dict[str, list[int]] = {f"agent {number}": [] for number in range(AGENTS)}
    begun: dict[str, list[list[int]]] = {agent: [] for agent in said}  # since the last acknowledged turn
    counts = {"turns": 0, "acknowledged": 0, "killed": 0, "frozen": 0, "warm": 0}
    try:
        for cycle in range(cycles):
            agent = dice.choice(list(said))
            which = dice.randrange(len(replicas))
            longer = [*said[agent], *(dice.randrange(1000) for _ in range(dice.randrange(1, 20))), cycle]
            begun[agent].append(longer)
            counts["turns"] += 1
            replicas[which].ask(agent, longer)
            fate = cycle % 10
            if fate in (1, 4, 7):
                time.sleep(dice.random() * 0.05)
                replicas[which].end()
                replicas[which] = Replica(url, home, next(numbers))
                counts["killed"] += 1
            elif fate == 8:
                time.sleep(dice.random() * 0.05)
                replicas[which].signal(signal.SIGSTOP)
                taken = _take_over(replicas[(which + 1) % 3], agent, said, begun, dice)
                replicas[which].signal(signal.SIGCONT)
                answer = replicas[which].answer()
                if not taken:
                    _settle(answer, agent, longer, said, begun, counts)
                elif answer is not None and answer[0]:  # before the other one, or after it, if it had not begun yet
                    begun[agent] = [longer]
                counts["frozen"] += 1
            else:
                _settle(replicas[which].answer(), agent, longer, said, begun, counts)
            _compare(url, home, agent, said, begun)
    finally:
        for replica in replicas:
            replica.end()
    return counts


def _take_over(replica: Replica, agent: str, said: Any, begun: Any, dice: random.Random) -> bool:
    """Another replica takes the turn of a frozen one, once its lease has run out; whether that was acknowledged. From
    then on the frozen one can't commit the turn that it has begun.
    """
    other = [*said[agent], 5000 + dice.randrange(1000)]
    begun[agent].append(other)
    replica.ask(agent, other)
    answer = replica.answer()
    assert answer is not None, "a replica ended by itself"
    if answer[0]:
        said[agent], begun[agent] = other, []
    return bool(answer[0])


def _settle(answer: Any, agent: str, tokens: list[int], said: Any, begun: Any, counts: Any) -> None:
    assert answer is not None, "a replica ended by itself"
    if answer[0]:
        said[agent], begun[agent] = tokens, []
        counts["acknowledged"] += 1
        counts["warm"] += answer[1] > 0


def _compare(url: str, home: Path, agent: str, said: Any, begun: Any) -> None:
    from everwarm.kv.remote.opening import open_warm
    from everwarm.kv.warm.blocks import ModelBlocks
    from kv.fake import model_ids

    place = open_warm(url, home, 1 << 20)
    try:
        stored = ModelBlocks(place, model_ids()).load("default", agent)
        tokens = [int(token) for token in stored.tokens]
    except FileNotFoundError:
        tokens = []
    finally:
        place.close()
    assert tokens in (said[agent], *begun[agent]), f"{agent}: an acknowledged turn is lost"
    said[agent] = tokens


def main() -> None:
    if sys.argv[1] == "--work":
        work(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    from kv.s3 import server

    cycles, seed = int(sys.argv[1]), int((sys.argv[2:] or ["1"])[0])
    with server() as running, tempfile.TemporaryDirectory() as home:
        print(json.dumps(torture(running.new_bucket(), Path(home), cycles, seed)))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main()

"""Random deeds in a `World`, and threads in a `Crowd`, for as long as is wanted: `python tests/kv/soak.py MINUTES`.

Everything about a world follows from its seed: its setting, its deeds, its faults and its crashes. `--world N` does one
of them again. What threads do depends on the machine, too: `--crowd N` does the same deeds, perhaps in another order.
"""

import argparse
import errno
import json
import logging
import random
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from kv import fake
from kv.crowd import Crowd
from kv.hostile import repeatable
from kv.lives import Setting
from kv.simulated_disk import memory_directory
from kv.world import World

STEPS = 150
NAMES = ["alice", "bob", "carol", "dave"]
KINDS = ["create", "write", "sync", "close", "rename", "unlink", "sync_directory", "any"]
DEEDS = {
    "talk": 10, "begin": 4, "grow": 6, "commit": 4, "suspend": 2, "resume": 3, "abandon": 1, "fork": 2, "pin": 2,
    "unpin": 1, "delete": 1, "evict": 4, "warm": 2, "export": 1, "import": 2, "expire": 1, "write": 2, "damage": 0.5,
    "look": 0.5, "restart": 1, "collect": 0.3, "arm": 2, "heal": 3, "disturbed": 6, "unreadable": 1,
    "crash": 1, "kill": 1,
}  # fmt: skip
DISTURBED = [
    "talk",
    "talk",
    "commit",
    "fork",
    "fork",
    "pin",
    "delete",
    "delete",
    "evict",
    "import",
    "expire",
    "restart",
]


def a_setting(draw: random.Random) -> Setting:
    return Setting(
        draw.choice([6, 9, 16, 40, None]),
        draw.choice([12, 20, 40, None, None]),
        draw.choice(["turn", "turn", "async"]),
        draw.choice(["always", "auto"]),
    )


def act(world: World, draw: random.Random, faults: list[str]) -> str:
    """Any deed; its name."""
    deed = draw.choices(list(DEEDS), list(DEEDS.values()))[0]
    if deed != "disturbed":
        do(world, deed, draw, faults)
        return deed
    during = draw.choice(DISTURBED)
    if faults:
        do(world, "arm", draw, faults)
    do(world, during, draw, faults)
    world.check_crash(draw.choice([0, 0, draw.randrange(20)]), draw.randrange(1 << 30))
    if draw.random() < 0.7:
        world.files.heal()
    return f"disturbed {during}"


def do(world: World, deed: str, draw: random.Random, faults: list[str]) -> None:
    which = draw.randrange(100)
    tenant = draw.choice(["default", "default", "other"])
    new = draw.choice(NAMES)
    match deed:
        case "talk":
            begin(world, draw, tenant)
            world.grow(-1, words(draw), draw.choice([1, 5, 20]), slow=draw.random() < 0.5)
            world.commit(-1, 20)
        case "begin":
            begin(world, draw, tenant)
        case "grow":
            world.grow(which, words(draw), draw.choice([1, 5, 20]), slow=draw.random() < 0.5)
        case "commit":
            world.commit(which, draw.choice([1, 20]))
        case "suspend":
            world.suspend(which)
        case "resume":
            world.resume(which)
        case "abandon":
            world.abandon(which)
        case "fork":
            world.fork(which, new)
        case "pin" | "unpin":
            world.pin(which, pinned=deed == "pin")
        case "delete":
            world.delete(which)
        case "evict":
            world.evict(which)
        case "warm":
            world.warm_up(which)
        case "export":
            world.export(which)
        case "import":
            world.import_(which, tenant, new, trust=draw.random() < 0.5)
        case "expire":
            world.expire(draw.choice([5.0, 20.0, 60.0]))
        case "write":
            world.write(draw.randrange(1, 5))
        case "damage":
            world.damage(draw.randrange(10**6))
        case "look":
            world.look()
        case "restart" | "collect":
            world.restart(collect=deed == "collect")
        case "arm" if faults:
            error = draw.choice([errno.ENOSPC, errno.EIO])
            world.files.arm(
                "+".join(draw.sample(faults, draw.choice([1, 1, 2, 3]))),
                draw.randrange(1, 6),
                error,
                lasting=draw.random() < 0.3,
            )
        case "unreadable" if faults:
            world.fail_reads(draw.randrange(1, 5), draw.choice([errno.EIO, errno.EMFILE]))
        case "heal":
            world.files.heal()
        case "crash" | "kill":
            back = draw.choice([0, draw.randrange(10), draw.randrange(60), draw.randrange(1000)])
            world.crash(back, power=deed == "crash", seed=draw.randrange(1 << 30))


def begin(world: World, draw: random.Random, tenant: str) -> None:
    name = draw.choice([*NAMES, *NAMES, None])
    group = draw.choice(["", "g"]) if name is None else ""
    kind = draw.choice(["on", "on", "on", "again", "edit", "anew"])
    world.begin(tenant, name, group, draw.randrange(100), kind, words(draw))


def words(draw: random.Random) -> list[int]:
    """Few different tokens, so that agents share beginnings by chance."""
    return [draw.randrange(3)] * draw.choice([1, 4, 8, 9, 16])


def live_world(seed: int, steps: int = STEPS) -> Counter[str]:
    """One deed after the other; then power is lost in some places, and at the end all that was said is there."""
    draw = random.Random(seed)
    faults, setting, done = draw.choice([[], KINDS]), a_setting(draw), list[str]()
    try:
        with fake.having(*fake.KINDS[seed % 4]), memory_directory() as directory, repeatable(seed) as reads:
            world = World(directory, setting, reads)
            for _ in range(steps):
                done.append(act(world, draw, faults))
                world.check()
            world.check_crashes(8, seed)
            world.close()
    except Exception as error:
        error.add_note(f"world {seed}, after {len(done)} steps ({' '.join(done[-5:])}), {setting}, faults {faults}")
        raise
    return world.counts


def live_crowd(seed: int, threads: int = 6, deeds: int = 40, crashes: int = 15) -> Counter[str]:
    """Threads that act at the same time; then power is lost in some places, and at the end all is there."""
    draw = random.Random(seed)
    faults, setting = draw.random() < 0.5, a_setting(draw)
    before = sys.getswitchinterval()
    sys.setswitchinterval(draw.choice([5e-6, 5e-5, 5e-3]))
    try:
        with fake.having(*fake.KINDS[seed % 4]), memory_directory() as directory:
            crowd = Crowd(directory, setting, seed, faults=faults)
            crowd.run(threads, deeds)
            crowd.finish(crashes)
    except Exception as error:
        error.add_note(f"crowd {seed}, {setting}, faults {faults}")
        raise
    finally:
        sys.setswitchinterval(before)
    return crowd.counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minutes", type=float, nargs="?", default=20.0)
    parser.add_argument("--first", type=int, default=int(time.time()), help="seed to begin with; by default the time")
    parser.add_argument("--world", type=int, help="do this one only")
    parser.add_argument("--crowd", type=int, help="do this one only")
    parser.add_argument("--steps", type=int, default=STEPS, help="deeds in a world")
    given = parser.parse_args()
    if given.world is not None:
        print(json.dumps(live_world(given.world, given.steps)))
        return
    if given.crowd is not None:
        print(json.dumps(live_crowd(given.crowd)))
        return
    logging.disable(logging.CRITICAL)
    counts: Counter[str] = Counter()
    started, seed = time.monotonic(), given.first
    while time.monotonic() < started + 60 * given.minutes:
        counts.update(live_world(seed, given.steps))
        counts["worlds"] += 1
        if seed % 2 == 0:
            counts.update(live_crowd(seed))
            counts["crowds"] += 1
        seed += 1
    print(
        f"{counts['worlds']} worlds and {counts['crowds']} crowds (seeds {given.first} to {seed - 1}), "
        f"{counts['acknowledged']} acknowledged turns, {counts['states after power loss']} states after power loss, "
        f"{time.monotonic() - started:.0f} s: nothing found",
        file=sys.stderr,
    )
    print(json.dumps(counts))


if __name__ == "__main__":
    main()

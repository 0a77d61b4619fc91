"""The index that drafts are read from: memory per million tokens, time to store a token and to propose.

    python benchmarks/drafts.py TEXT.txt [TOKENS]

Text becomes tokens of a million-token index: words of the file in a random walk, so that matches of all lengths occur.
"""

import random
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

from everwarm.engine.drafts.acceptance import Acceptance
from everwarm.engine.drafts.lookup import Lookup
from everwarm.kernels import _native


def main() -> None:
    words = Path(sys.argv[1]).read_text(encoding="utf-8").split()
    wanted = int(sys.argv[2]) if len(sys.argv) > 2 else 1 << 20
    ids = {word: number for number, word in enumerate(sorted(set(words)))}
    text = [ids[word] for word in words]
    following = defaultdict(list)
    for at, token in enumerate(text[:-1]):
        following[token].append(at + 1)
    draw, at, walk = random.Random(1), 0, []
    while len(walk) < wanted:
        walk.append(text[at])
        at = draw.choice(following[text[at]]) if draw.random() < 0.2 and following[text[at]] else (at + 1) % len(text)
    index = _native.Suffixes(wanted)
    array = np.array(walk, np.int32)
    started = time.perf_counter()
    index.extend(array)
    print(f"store: {(time.perf_counter() - started) / wanted * 1e9:.0f} ns per token")
    print(f"memory: {index.bytes_per_token} bytes per token of room; {index.size_bytes / 1e6:.1f} MB for {wanted:,}")
    lookup = Lookup(walk[:4000], 32768, Acceptance(Acceptance()), index)
    times, tokens = [], list(walk[:4000])
    for token in walk[4000:24000]:
        started = time.thread_time()  # other programs on the machine don't count
        lookup.propose(tokens, [], 24)
        lookup.accepted([token])
        times.append(time.thread_time() - started)
        tokens.append(token)
    times.sort()
    middle, late = (1e6 * times[int(share * len(times))] for share in (0.5, 0.99))
    print(f"propose and learn, CPU time: median {middle:.1f} us, p99 {late:.1f} us, most {1e6 * times[-1]:.0f} us")


if __name__ == "__main__":
    main()

"""What a long prefill does to others, and they to it.

alone    the long prompt by itself
short    beside it, one after another, short requests whose prompt is known: their first token, and from token to token
stream   beside it, somebody who decodes all the time: the speed of the prompt

python benchmarks/long_prefill.py MODEL.gguf alone|short|stream [TOKENS]
"""

import random
import statistics
import sys
import threading
import time

import everwarm
from everwarm.llm import LLM

WORDS = ["the", "house", "by", "sea", "has", "a", "blue", "door", "and", "garden", "with", "old", "trees", "where"]
OPTIONS = {"temperature": 0, "ignore_eos": True}


def prompt(llm: LLM, tokens: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return llm.tokenize(" ".join(draw.choice(WORDS) for _ in range(tokens)))[:tokens]


def beside_short(llm: LLM, known: list[int], long: threading.Thread) -> None:
    firsts: list[float] = []
    gaps: list[float] = []
    while long.is_alive() and len(firsts) < 25:
        last = time.perf_counter()
        times = []
        for event in llm.stream(tokens=known + [5] * 9, max_tokens=16, **OPTIONS):
            if isinstance(event, everwarm.Event):
                now = time.perf_counter()
                times.append(now - last)
                last = now
        firsts.append(times[0])
        gaps += times[1:]
        time.sleep(random.random())
    gaps.sort()
    print(
        f"{len(firsts)} short requests: first token p50 {statistics.median(firsts):.3f} s, most {max(firsts):.3f} s; "
        f"token to token p99 {gaps[int(0.99 * len(gaps))]:.3f} s, most {gaps[-1]:.3f} s"
    )


def beside_stream(llm: LLM, known: list[int], long: threading.Thread) -> None:
    while long.is_alive():
        for _ in llm.stream(tokens=known + [5] * 9, max_tokens=2000, **OPTIONS):
            if not long.is_alive():
                break


def main() -> None:
    path, what = sys.argv[1], sys.argv[2]
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 16_000
    with everwarm.load(path, warm="off") as llm:
        llm.warm_up()
        known, tokens = prompt(llm, 300, 7), prompt(llm, count, 5)
        llm.generate(tokens=known, agent="short", max_tokens=8, **OPTIONS)
        took: list[float] = []

        def compute() -> None:
            began = time.perf_counter()
            llm.generate(tokens=tokens, agent="long", max_tokens=1, **OPTIONS)
            took.append(time.perf_counter() - began)

        long = threading.Thread(target=compute)
        long.start()
        time.sleep(3)
        if what == "short":
            beside_short(llm, known, long)
        elif what == "stream":
            beside_stream(llm, known, long)
        long.join()
        print(f"{what}: {count} tokens in {took[0]:.1f} s, {count / took[0]:.1f} tokens/s")


if __name__ == "__main__":
    main()

"""What open pages cost: processor time of the server while it idles, and tokens per second while it writes.

    python benchmarks/page_cost.py [--pairs 20] [--pages 5] [--agents 200]

Proves that live updates take less than 1 % of a core and nothing from the token loop. A server with SmolLM2 is asked
for the same answer again and again, in pairs: once with no page open, once with some (the order alternates). A page is
what the browser asks for: one stream of live events, which is read. Printed: processor seconds per second of an idle
server with 0 and N pages, and the mean ratio of tokens per second with its 95 % interval (the aim: above 0.97).
"""

import argparse
import contextlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from everwarm import config
from everwarm.pull import pull

TOKENS = 160


@contextlib.contextmanager
def serving(model: Path, home: str) -> Iterator[tuple[str, int]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = os.environ | {config.PREFIX + "HOME": home}
    command = [sys.executable, "-m", "everwarm", "serve", str(model), "--port", str(port)]
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(url + "/health").status_code == 200:
                    break
            time.sleep(0.2)
        yield url, server.pid
    finally:
        server.terminate()
        server.wait()


@contextlib.contextmanager
def pages(url: str, count: int) -> Iterator[None]:
    """So many streams of live events, each read by a thread."""
    ended = threading.Event()

    def read() -> None:
        with contextlib.suppress(httpx.HTTPError), httpx.stream("GET", url + "/v1/page/live", timeout=60) as response:
            for _ in response.iter_raw():
                if ended.is_set():
                    return

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_share(url: str, pid: int, count: int, seconds: float) -> float:
    with pages(url, count):
        time.sleep(2.0)
        before = cpu_s(pid)
        time.sleep(seconds)
        return (cpu_s(pid) - before) / seconds


def speed(url: str) -> float:
    body = {
        "messages": [{"role": "user", "content": "Count from one to a thousand, in words."}],
        "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    said = httpx.post(url + "/v1/chat/completions", json=body, timeout=600).json()
    return float(said["timings"]["predicted_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--pages", type=int, default=5)
    parser.add_argument("--agents", type=int, default=200)
    parser.add_argument("--idle", type=float, default=20.0, help="seconds over which an idle server is watched")
    asked = parser.parse_args()
    model = pull("smollm2", config.home())
    with tempfile.TemporaryDirectory(prefix="everwarm-cost-") as home, serving(model, home) as (url, pid):
        first = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1, "everwarm": {"agent": "a"}}
        httpx.post(url + "/v1/chat/completions", json=first, timeout=600).raise_for_status()
        for number in range(asked.agents):
            httpx.post(url + "/v1/agents/a/fork", json={"name": f"a{number}"}, timeout=60)
        idle = {count: idle_share(url, pid, count, asked.idle) for count in (0, 1, asked.pages)}
        speed(url)
        ratios, without = [], []
        for pair in range(asked.pairs):
            got = {}
            for count in (0, asked.pages) if pair % 2 == 0 else (asked.pages, 0):
                with pages(url, count):
                    time.sleep(0.7)
                    got[count] = speed(url)
            ratios.append(got[asked.pages] / got[0])
            without.append(got[0])
    mean = statistics.fmean(ratios)
    half = 1.96 * statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.inf
    for count, share in idle.items():
        print(f"idle server, {asked.agents} agents, {count} pages open: {100 * share:.2f} % of a core")
    print(f"tokens/s without a page: median {statistics.median(without):.1f}")
    interval = f"{mean - half:.4f} to {mean + half:.4f}"
    print(f"with {asked.pages} pages, {len(ratios)} pairs: ratio {mean:.4f}, 95 % interval {interval}")
    said = {"idle": idle, "ratio": mean, "low": mean - half, "high": mean + half, "pairs": len(ratios)}
    print(json.dumps(said | {"tokens_per_s": statistics.median(without), "pages": asked.pages, "agents": asked.agents}))


if __name__ == "__main__":
    main()

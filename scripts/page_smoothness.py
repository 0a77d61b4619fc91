"""Whether the page stays smooth with thousands of agents, and how long it takes to be usable.

    python scripts/page_smoothness.py [--agents 2000]

A server with a tiny model gets so many agents. Chromium opens the list of agents and scrolls through all of it; the
time of each frame is measured by the page's own clock. The aim: no frame over 50 ms. Also measured: the time until the
page can be used, and what has to be fetched for it. A table for people, then one line of JSON.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "tests"), str(ROOT / "tests" / "server")]

import httpx
from chromium import launched, look, opened
from running import running

from everwarm.server.page import static
from tiny import Tiny

SCROLL = """(async () => {
  const rows = document.querySelector(".rows"), frames = [];
  const end = rows.scrollHeight - rows.clientHeight, started = performance.now();
  let last = await new Promise(requestAnimationFrame);
  const took = SECONDS * 1000;
  while (true) {
    const now = await new Promise(requestAnimationFrame);
    frames.push(now - last);
    last = now;
    const share = (performance.now() - started) / took;
    if (share >= 1) break;
    rows.scrollTop = end * share;
  }
  return frames;
})()"""

READY = """(() => {
  const shown = performance.getEntriesByName("first-contentful-paint")[0];
  return [shown ? shown.startTime : null, performance.now()];
})()"""


def fill(url: str, count: int) -> None:
    """Agents that share a beginning and go their own ways, as forks of a few."""
    hello = "You are one of many who begin alike. " * 6
    with httpx.Client(base_url=url, timeout=600) as client:
        for number in range(10):
            said = [{"role": "system", "content": hello}, {"role": "user", "content": f"I am number {number}. " * 6}]
            body = {"messages": said, "max_tokens": 2, "everwarm": {"agent": f"agent-{number:04}"}}
            client.post("/v1/chat/completions", json=body).raise_for_status()
        for number in range(10, count):
            client.post(f"/v1/agents/agent-{number % 10:04}/fork", json={"name": f"agent-{number:04}"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=8.0, help="how long the scroll through all of them takes")
    asked = parser.parse_args()
    os.environ.setdefault("EVERWARM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="everwarm-smooth-") as folder, launched() as browser:
        Tiny(context=512).write(Path(folder) / "tiny.gguf")
        with running(Path(folder) / "tiny.gguf", Path(folder)) as server:
            fill(server.url, asked.agents)
            said = measure(browser, server.url, asked.seconds)
    said["agents"] = asked.agents
    print(f"{asked.agents} agents, scrolled through in {asked.seconds:g} s: {said['frames']} frames")
    middle, most = said["median_ms"], said["most_ms"]
    print(f"frame: median {middle:.1f} ms, 99 % below {said['p99_ms']:.1f} ms, longest {most:.1f} ms")
    print(f"first paint {said['paint_ms']:.0f} ms, usable with live data after {said['usable_ms']:.0f} ms")
    print(f"page: {said['weight_bytes']:,} bytes compressed")
    print(json.dumps(said))


def measure(browser: Any, url: str, seconds: float) -> dict[str, Any]:
    page = opened(browser, url + "/#/agents")
    page.wait_for_selector(".row")
    paint, usable = look(page, READY)
    look(page, SCROLL.replace("SECONDS", "1"))  # once to warm up
    frames = look(page, SCROLL.replace("SECONDS", str(seconds)))
    page.context.close()
    return {
        "frames": len(frames),
        "median_ms": statistics.median(frames),
        "p99_ms": sorted(frames)[int(0.99 * len(frames))],
        "most_ms": max(frames),
        "over_50_ms": sum(frame > 50 for frame in frames),
        "paint_ms": paint or 0.0,
        "usable_ms": usable,
        "weight_bytes": static.weight(),
    }


if __name__ == "__main__":
    main()

"""Proves what the server promises on SmolLM2, over HTTP, each part by its name:

interference  another stream's token-to-token times while a prompt of 4K tokens is computed, and that prompt's speed
              beside its speed alone
steady        100 requests: the same weight cache, no misses, how much tok/s varies
restart       from the start of a process to the first token of an agent that returns with 4K tokens

python benchmarks/serving.py interference steady restart
"""

import asyncio
import json
import re
import statistics
import sys
import time
from typing import Any

from everwarm import config
from everwarm.bench.load import server as load_server
from everwarm.bench.load.client import Client, Heard
from everwarm.bench.load.report import percentiles
from everwarm.bench.ttft.text import text
from everwarm.bench.ttft.ttft import temporary_home
from everwarm.pull import resolve

MODEL = "smollm2"
SENTENCES_4K = 340  # about 4,000 tokens
GREEDY = {"temperature": 0.0, "logit_bias": {str(token): -100 for token in range(17)}}  # its control tokens


def said(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


async def interference(client: Client) -> dict[str, Any]:
    rounds = []
    for number in range(3):
        alone = await client.chat(said(text(SENTENCES_4K, 100 + number)), f"alone-{number}", GREEDY | {"max_tokens": 2})
        stream = asyncio.create_task(
            client.chat(said(text(4, 200 + number)), f"s-{number}", GREEDY | {"max_tokens": 400})
        )
        await asyncio.sleep(0.4)
        long = await client.chat(said(text(SENTENCES_4K, 300 + number)), f"long-{number}", GREEDY | {"max_tokens": 2})
        other = await stream
        during = [b - a for a, b in zip(other.deltas, other.deltas[1:], strict=False) if long.sent < b < long.deltas[0]]
        rounds.append(
            {
                "prompt_tokens": long.prompt_tokens,
                "alone_tok_s": alone.prompt_tokens / alone.ttft_s,
                "beside_tok_s": long.prompt_tokens / long.ttft_s,
                "share": (long.prompt_tokens / long.ttft_s) / (alone.prompt_tokens / alone.ttft_s),
                "gaps": len(during),
                "inter_token_s": percentiles(during) | {"max": max(during)},
            }
        )
    return {"rounds": rounds, "share": statistics.median(one["share"] for one in rounds)}


async def steady(client: Client) -> dict[str, Any]:
    seen, rates = set(), []
    before = await metrics(client)
    for number in range(100):
        heard = await client.chat(said(text(4, 500 + number)), f"steady-{number}", GREEDY | {"max_tokens": 32})
        rates.append((len(heard.deltas) - 1) / (heard.deltas[-1] - heard.deltas[0]))
        if number % 10 == 9:
            seen.add((await metrics(client))["instance"])
    after = await metrics(client)
    mean = statistics.fmean(rates)
    return {
        "instances": len(seen),
        "misses": after["misses"] - before["misses"],
        "tok_s": mean,
        "variation": statistics.stdev(rates) / mean,
    }


async def metrics(client: Client) -> dict[str, Any]:
    shown = await client.call("GET", "/metrics")
    instance = re.search(r'everwarm_weight_cache_info\{.*instance="([^"]+)"', shown)
    misses = re.search(r"^everwarm_weight_cache_misses_total (\S+)", shown, re.MULTILINE)
    assert instance
    assert misses
    return {"instance": instance[1], "misses": float(misses[1])}


def restart(model: Any, home: Any) -> dict[str, Any]:
    rounds = []
    for number in range(3):
        agent, messages = f"r-{number}", said(text(SENTENCES_4K, 900 + number))

        def ask(server: load_server.ServerProcess, agent: str = agent, messages: Any = messages) -> Heard:
            return asyncio.run(Client(server.url).chat(messages, agent, GREEDY | {"max_tokens": 8}))

        with load_server.everwarm(model, home, {"warm": "on"}) as server:
            first = ask(server)
            messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
            server.end(9)
        with load_server.everwarm(model, home, {"warm": "on"}) as server:
            ready = time.perf_counter()
            heard = ask(server)
        rounds.append(
            {
                "ready_s": ready - server.started,
                "first_token_s": heard.deltas[0] - server.started,
                "tier": heard.receipt["tier"],
                "cached_tokens": heard.cached_tokens,
                "prompt_tokens": heard.prompt_tokens,
            }
        )
    return {"rounds": rounds, "first_token_s": statistics.median(one["first_token_s"] for one in rounds)}


def main() -> None:
    asked = sys.argv[1:] or ["interference", "steady", "restart"]
    model = resolve(MODEL, config.home())
    with temporary_home() as home:
        for name in asked:
            if name == "restart":
                found = restart(model, home)
            else:
                part = {"interference": interference, "steady": steady}[name]
                with load_server.everwarm(model, home, {"warm": "on"}) as server:
                    asyncio.run(Client(server.url).chat(said(text(40, 1)), "warm-up", {"max_tokens": 8}))
                    found = asyncio.run(part(Client(server.url)))
            print(json.dumps({"benchmark": name} | found), flush=True)


if __name__ == "__main__":
    main()

"""A conversation of an agent with tools, turn by turn: how much of what was known is reused, and the first token beside
llama-server's (prompt cache on).

The client does what agent programs do: it sends the whole history with every request, with calls in its own spelling
(another order of keys, other spaces) and texts without their blank ends. Every other answer is a call, which is
required; its result follows. In the middle both servers are killed and started again. llama-server gets the same
conversations, so the prompts say the same. Reused / possible: of the tokens that the turn before has computed (its
prompt and all of its answer but the last token).

    python benchmarks/agent_turns.py MODEL [--turns 10] [--peer] [--json]
"""

import argparse
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx

from everwarm import config
from everwarm.bench.load import server as load_server
from everwarm.bench.ttft.text import text
from everwarm.bench.ttft.ttft import temporary_home
from everwarm.pull import resolve

Json = dict[str, Any]
CONTEXT = 8192
WORDS = 40  # tokens of an answer, at most

TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{verb} a file of the project. Paths are relative to its root.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "maxLength": 40},
                    "line": {"type": "integer"},
                    "all": {"type": "boolean"},
                },
                "required": ["path", "line", "all"],
                "additionalProperties": False,
            },
        },
    }
    for name, verb in (("read_file", "Read"), ("write_file", "Write"), ("search_file", "Search"), ("test_file", "Test"))
]


def respelt(message: Json) -> Json:
    """The answer as a client writes it down: parsed and serialised again."""
    out: Json = {"role": "assistant", "content": (message.get("content") or "").strip() or None}
    calls = message.get("tool_calls") or []
    if calls:
        out["tool_calls"] = [
            {
                "id": f"call_{random.randrange(10**9)}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(
                        dict(reversed(json.loads(call["function"]["arguments"]).items())), indent=1
                    ),
                },
            }
            for call in calls
        ]
    return out


def ask(client: httpx.Client, url: str, body: Json) -> tuple[float, Json, Json]:
    """Seconds to the first token, the message, and the last object that tells of usage."""
    sent = time.perf_counter()
    first = 0.0
    message: Json = {"content": "", "tool_calls": []}
    told: Json = {}
    with client.stream("POST", f"{url}/v1/chat/completions", json=body | {"stream": True}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line[6:])
            told |= {name: chunk[name] for name in ("usage", "everwarm", "timings") if chunk.get(name)}
            for choice in chunk.get("choices", ()):
                delta = choice["delta"]
                if not first and (delta.get("content") or delta.get("tool_calls")):
                    first = time.perf_counter() - sent
                message["content"] += delta.get("content") or ""
                for call in delta.get("tool_calls") or ():
                    if call["index"] == len(message["tool_calls"]):
                        message["tool_calls"].append({"function": {"name": "", "arguments": ""}})
                    for name in ("name", "arguments"):
                        message["tool_calls"][-1]["function"][name] += (call.get("function") or {}).get(name) or ""
    return first or time.perf_counter() - sent, message, told


def run(model: Path, turns: int, peer: bool) -> list[Json]:
    rows: list[Json] = []
    messages: list[Json] = [
        {"role": "system", "content": "You help with a project. " + text(60, 1)},
        {"role": "user", "content": "Look at the project and tell me what you find. " + text(4, 2)},
    ]
    known = 0
    threads = config.cores()
    with temporary_home() as home, httpx.Client(timeout=1200) as client:
        ours = load_server.everwarm(model, home, {}, "--context", str(CONTEXT))
        theirs = load_server.llama_cpp(model, 1, CONTEXT, threads) if peer else None
        for server in filter(None, (ours, theirs)):
            server.wait_ready()
        try:
            for turn in range(turns):
                if turn == turns // 2:
                    for server in filter(None, (ours, theirs)):
                        server.end(signal.SIGKILL)
                    ours = load_server.everwarm(model, home, {}, "--context", str(CONTEXT))
                    theirs = load_server.llama_cpp(model, 1, CONTEXT, threads) if peer else None
                    for server in filter(None, (ours, theirs)):
                        server.wait_ready()
                call = turn % 2 == 0
                body: Json = {
                    "model": "any", "messages": messages, "tools": TOOLS, "max_tokens": 200 if call else WORDS,
                    "temperature": 0.0, "parallel_tool_calls": False, "tool_choice": "required" if call else "auto",
                    "stream_options": {"include_usage": True},
                }  # fmt: skip
                seconds, message, told = ask(client, ours.url, body)
                receipt, usage = told["everwarm"], told["usage"]
                row: Json = {
                    "turn": turn + 1,
                    "prompt": receipt["prompt_tokens"],
                    "reused": receipt["cached_tokens"],
                    "possible": known,
                    "share": receipt["cached_tokens"] / known if known else None,
                    "tier": receipt["tier"],
                    "replayed": receipt["replayed_answers"],
                    "ttft_s": seconds,
                    "restarted": turn == turns // 2,
                }
                known = usage["prompt_tokens"] + usage["completion_tokens"] - 1
                if theirs is not None:
                    # Only its first token is asked for, and not as a call: its grammar would be compiled meanwhile.
                    plain = {name: body[name] for name in ("model", "messages", "tools", "temperature")}
                    seconds, _, told = ask(client, theirs.url, plain | {"max_tokens": 2, "cache_prompt": True})
                    row |= {"peer_ttft_s": seconds, "peer_reused": (told.get("timings") or {}).get("cache_n")}
                rows.append(row)
                answer = respelt(message)
                messages.append(answer)
                calls = answer.get("tool_calls") or ()
                messages += [
                    {"role": "tool", "tool_call_id": one["id"], "content": text(5, 100 + turn)} for one in calls
                ] or [{"role": "user", "content": "Go on. " + text(3, 200 + turn)}]
        finally:
            for server in filter(None, (ours, theirs)):
                server.end()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--peer", action="store_true", help="beside llama-server")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = run(resolve(options.model, config.home()), options.turns, options.peer)
    if options.json:
        print(json.dumps({"command": " ".join(sys.argv), "cpus": os.cpu_count(), "rows": rows}))
        return
    print("turn  prompt  reused  possible  share  tier  replayed  first token  llama-server (reused)")
    for row in rows:
        share = "" if row["share"] is None else f"{row['share']:.3f}"
        peer = f"{row['peer_ttft_s']:.2f} s ({row['peer_reused']})" if "peer_ttft_s" in row else ""
        mark = "  after a kill" if row["restarted"] else ""
        print(
            f"{row['turn']:4}  {row['prompt']:6}  {row['reused']:6}  {row['possible']:8}  {share:5}  {row['tier']:4}"
            f"  {row['replayed']:8}  {row['ttft_s']:9.2f} s  {peer}{mark}"
        )


if __name__ == "__main__":
    main()

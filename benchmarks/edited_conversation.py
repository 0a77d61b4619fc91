"""What is computed again when a conversation is edited: everwarm beside llama-server, by their own counters.

Both get the same conversation, one turn after the other. Answers are prescribed by a grammar, so that both say the
same. Then a client does what clients do: it asks the last question differently, takes back two turns, edits the first
question, comes back to the conversation as it was, begins another one with the same instructions, and, when both
servers were killed and started again, comes back once more. Of each request: the tokens of the prompt, and how many of
them were computed (everwarm: the receipt; llama-server: `timings.prompt_n`). Counts do not depend on the load of the
machine. An answer that comes back keeps the tokens it was sampled with in everwarm, while llama-server tokenises its
text: prompts of later turns differ a little.

    python benchmarks/edited_conversation.py MODEL [--llama-server PATH] [--turns 8] [--sentences 25]
"""

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx

from everwarm import config
from everwarm.bench.load import server as load_server
from everwarm.bench.ttft.text import text
from everwarm.bench.ttft.ttft import temporary_home
from everwarm.pull import resolve

Json = dict[str, Any]
CONTEXT = 16384
AFTER_KILL = "as it was, after kill -9"
ANSWER = "Yes, that is so, and the reason for it is in the text that you have shown to me."


def user(words: str) -> Json:
    return {"role": "user", "content": words}


def requests(turns: int, size: int) -> list[tuple[str, list[Json]]]:
    """What is sent, in order: a name and the messages of each."""
    system = {"role": "system", "content": "You answer questions about texts. " + text(size, 1)}
    questions = [user(f"Question {number}: is this true? {text(size, 10 + number)}") for number in range(turns)]
    answer = {"role": "assistant", "content": ANSWER}

    def conversation(asked: list[Json]) -> list[Json]:
        between = [message for question in asked[:-1] for message in (question, answer)]
        return [system, *between, asked[-1]]

    other = user("Let me ask otherwise: what is missing here? " + text(size, 99))
    grown = [(f"turn {turn + 1}", conversation(questions[: turn + 1])) for turn in range(turns)]
    return [
        *grown,
        ("the last question, asked otherwise", conversation([*questions[:-1], other])),
        ("two turns taken back", conversation([*questions[:-2], other])),
        ("the first question edited", conversation([other, *questions[1:]])),
        ("back to the conversation as it was", conversation(questions)),
        ("another one, the same instructions", conversation([user("Something else: " + text(size, 98))])),
        (AFTER_KILL, conversation(questions)),
    ]


def ask(client: httpx.Client, url: str, messages: list[Json]) -> Json:
    body = {
        "model": "any", "messages": messages, "max_tokens": 64, "temperature": 0.0, "cache_prompt": True,
        "grammar": f"root ::= {json.dumps(ANSWER)}",
    }  # fmt: skip
    answer = client.post(f"{url}/v1/chat/completions", json=body)
    answer.raise_for_status()
    told: Json = answer.json()
    assert told["choices"][0]["message"]["content"] == ANSWER, told["choices"][0]
    return told


def run(model: Path, turns: int, size: int, peer: bool, flags: list[str]) -> list[Json]:
    rows: list[Json] = []

    def start(home: Path) -> list[load_server.ServerProcess]:
        started = [load_server.everwarm(model, home, {}, "--context", str(CONTEXT))]
        if peer:
            started.append(load_server.llama_cpp(model, 1, CONTEXT, config.cores(), *flags))
        for server in started:
            server.wait_ready()
        return started

    with temporary_home() as home, httpx.Client(timeout=1200) as client:
        servers = start(home)
        try:
            for name, messages in requests(turns, size):
                if name == AFTER_KILL:
                    for server in servers:
                        server.end(signal.SIGKILL)
                    servers = start(home)
                receipt = ask(client, servers[0].url, messages)["everwarm"]
                row = {
                    "request": name,
                    "prompt": receipt["prompt_tokens"],
                    "known": receipt["known_tokens"],
                    "computed": receipt["prompt_tokens"] - receipt["cached_tokens"],
                }
                if peer:
                    timings = ask(client, servers[1].url, messages)["timings"]
                    row |= {"llama_prompt": timings["prompt_n"] + timings.get("cache_n", 0)}
                    row |= {"llama_computed": timings["prompt_n"]}
                rows.append(row)
                show(row)
        finally:
            for server in servers:
                server.end()
    return rows


def show(row: Json) -> None:
    known = row["prompt"] - row["known"]  # what no cache could have had
    theirs = f"{row['llama_computed']:>12,}" if "llama_computed" in row else f"{'-':>12}"
    print(f"{row['request']:36}{row['prompt']:>8,}{known:>8,}{row['computed']:>10,}{theirs}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--sentences", type=int, default=25, help="of a question, of about 11 tokens each")
    parser.add_argument("--no-peer", action="store_true", help="without llama-server")
    parser.add_argument("--llama-server", type=Path, help="where it is, if not in .venv-peers or on the path")
    parser.add_argument("--llama-flag", action="append", default=[], help="a flag for llama-server; may be repeated")
    given = parser.parse_args()
    if given.llama_server is not None:
        os.environ["PATH"] = f"{given.llama_server.resolve().parent}{os.pathsep}{os.environ['PATH']}"
    model = resolve(given.model, config.home())
    print(f"{'':36}{'prompt':>8}{'new':>8}{'everwarm':>10}{'llama-server':>14}")
    rows = run(model, given.turns, given.sentences, not given.no_peer, given.llama_flag)
    sums = [sum(row[key] for row in rows) for key in ("prompt", "computed")]
    theirs = sum(row.get("llama_computed", 0) for row in rows)
    print(f"{'all of them':36}{sums[0]:>8,}{'':8}{sums[1]:>10,}" + (f"{theirs:>12,}" if theirs else ""))
    print(json.dumps(rows))


if __name__ == "__main__":
    main()

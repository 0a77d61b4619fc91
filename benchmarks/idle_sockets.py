"""Proves that connections which only sit there take nothing from those who talk: eight agents on a real server, alone
and beside 2,000 idle sockets and 48 clients that don't read their answers.

    python benchmarks/idle_sockets.py [--sockets 2000] [--readers 48] [--agents 8] [--rounds 15] [--model smollm2]

Half of the idle sockets send nothing, half send the beginning of a request. Whenever the server closes one, another is
opened at once. The slow readers ask for an agent's export, or for the API's schema 100 times over, and read a byte per
second. They live in a process of their own, on the same cores. A round begins when all of them are there and what was
sent fills the buffers. Rounds with and without them take turns; a round is two turns of every agent, all at once.
Wanted: the median of disturbed / undisturbed throughput is at least 0.95, and every turn is committed. Where others use
the machine, too, tokens per second of the server's processor time are the steadier figure.
"""

import argparse
import asyncio
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path
from typing import Any

from everwarm import config
from everwarm.bench.load import server as load_server
from everwarm.bench.load.client import Client, Heard
from everwarm.bench.ttft.text import text
from everwarm.bench.ttft.ttft import temporary_home
from everwarm.pull import resolve
from everwarm.server.descriptors import raise_limit

HALF = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
SCHEMA = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100
EXPORT = b"POST /v1/agents/exported/export HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
GREEDY = {"temperature": 0.0, "logit_bias": {str(token): -100 for token in range(17)}}  # its control tokens
SETTLED_S = 6.0
TURNS = 2
LEAST = 0.95


# The process that disturbs --------------------------------------------------------------------------------------------


class Disturber:
    """Idle sockets and slow readers. Those that the server closes come back."""

    def __init__(self, url: str, idle: int, readers: int) -> None:
        parts = urllib.parse.urlsplit(url)
        self._address = parts.hostname or "", parts.port or 80
        self._poll = select.epoll()
        self._idle: dict[int, tuple[socket.socket, bytes]] = {}
        self._readers: list[socket.socket] = []
        self.reopened = 0
        for number in range(idle):
            self._open_idle(HALF if number % 2 else b"")
        for number in range(readers):
            self._readers.append(self._connect(EXPORT if number % 4 == 0 else SCHEMA, buffer=4096))

    def _connect(self, sent: bytes, buffer: int | None = None) -> socket.socket:
        connection = socket.socket()
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.settimeout(30)
        connection.connect(self._address)
        connection.sendall(sent)
        connection.setblocking(False)
        return connection

    def _open_idle(self, sent: bytes) -> None:
        connection = self._connect(sent)
        self._idle[connection.fileno()] = connection, sent
        self._poll.register(connection, select.EPOLLRDHUP | select.EPOLLIN)

    def run(self, seconds: float | None = None) -> None:
        """For so many seconds, or until standard input is closed."""
        if seconds is None:
            self._poll.register(sys.stdin, select.EPOLLIN | select.EPOLLHUP)
        next_read = started = time.monotonic()
        while seconds is None or time.monotonic() < started + seconds:
            for number, _ in self._poll.poll(max(0.0, next_read - time.monotonic())):
                if number == sys.stdin.fileno():
                    return
                connection, sent = self._idle.pop(number)
                self._poll.unregister(connection)
                connection.close()
                self._open_idle(sent)
                self.reopened += 1
            if time.monotonic() >= next_read:
                next_read += 1.0
                self._read_a_byte()

    def _read_a_byte(self) -> None:
        for number, connection in enumerate(self._readers):
            try:
                gone = connection.recv(1) == b""
            except BlockingIOError:
                gone = False
            except OSError:
                gone = True
            if gone:
                connection.close()
                self._readers[number] = self._connect(EXPORT if number % 4 == 0 else SCHEMA, buffer=4096)
                self.reopened += 1


def disturb(url: str, idle: int, readers: int) -> None:
    raise_limit()
    disturber = Disturber(url, idle, readers)
    disturber.run(SETTLED_S)
    print("ready", flush=True)
    disturber.run()
    print(json.dumps({"reopened": disturber.reopened}), flush=True)


# The agents -----------------------------------------------------------------------------------------------------------


async def talk(client: Client, name: str, number: int) -> list[Heard]:
    """All turns of one agent."""
    messages: list[dict[str, str]] = []
    turns = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": text(4, 10 * number + turn)})
        heard = await client.chat(messages, name, GREEDY | {"max_tokens": 64})
        turns.append(heard)
        messages.append({"role": "assistant", "content": heard.text})
    return turns


async def round_of(server: load_server.ServerProcess, agents: int, name: str) -> dict[str, Any]:
    """Tokens per second of all agents together, per second of the server's processor time, and what went wrong."""
    started, cpu_s = time.perf_counter(), server_cpu_s(server.pid)
    clients = [talk(Client(server.url), f"{name}-{number}", number) for number in range(agents)]
    turns = [turn for one in await asyncio.gather(*clients) for turn in one]
    spent, cpu_s = time.perf_counter() - started, server_cpu_s(server.pid) - cpu_s
    errors = [turn.error or str(turn.receipt.get("error")) for turn in turns if not turn.receipt.get("committed")]
    return {
        "tok_s": sum(turn.tokens for turn in turns) / spent,
        "tok_cpu_s": sum(turn.tokens for turn in turns) / cpu_s,
        "worst_ttft_s": max((turn.ttft_s for turn in turns if turn.deltas), default=0.0),
        "turns": len(turns),
        "committed": len(turns) - len(errors),
        "errors": errors[:3],
    }


def server_cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def open_sockets(pid: int) -> int:
    folder = Path(f"/proc/{pid}/fd")
    return sum(os.readlink(one).startswith("socket:") for one in folder.iterdir() if one.is_symlink())


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    rounds: list[dict[str, Any]] = []
    with temporary_home() as home:
        model = resolve(asked.model, config.home())
        with load_server.everwarm(model, home, {"warm": "on"}) as server:
            long = [{"role": "user", "content": text(24, 1)}]
            asyncio.run(Client(server.url).chat(long, "exported", GREEDY | {"max_tokens": 8}))
            asyncio.run(round_of(server, asked.agents, "warm-up"))
            for number in range(asked.rounds):
                pair: dict[str, Any] = {}
                for state in ("undisturbed", "disturbed") if number % 2 else ("disturbed", "undisturbed"):
                    if state == "undisturbed":
                        pair[state] = asyncio.run(round_of(server, asked.agents, f"{number}-a"))
                        continue
                    command = [sys.executable, __file__, "--disturb", server.url]
                    command += ["--sockets", str(asked.sockets), "--readers", str(asked.readers)]
                    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
                        assert other.stdin
                        assert other.stdout
                        assert other.stdout.readline() == "ready\n"
                        pair[state] = asyncio.run(round_of(server, asked.agents, f"{number}-b"))
                        pair["open_sockets"] = open_sockets(server.pid)
                        other.stdin.close()
                        pair |= json.loads(other.stdout.readline())
                for of, ratio in (("tok_s", "ratio"), ("tok_cpu_s", "cpu_ratio")):
                    pair[ratio] = pair["disturbed"][of] / pair["undisturbed"][of]
                rounds.append(pair)
                time.sleep(0.5)  # what was closed is noticed
    return {
        "sockets": asked.sockets,
        "readers": asked.readers,
        "agents": asked.agents,
        "undisturbed_tok_s": statistics.median(one["undisturbed"]["tok_s"] for one in rounds),
        "disturbed_tok_s": statistics.median(one["disturbed"]["tok_s"] for one in rounds),
        "ratio": statistics.median(one["ratio"] for one in rounds),
        "cpu_ratio": statistics.median(one["cpu_ratio"] for one in rounds),
        "turns": sum(one[state]["turns"] for one in rounds for state in ("undisturbed", "disturbed")),
        "committed": sum(one[state]["committed"] for one in rounds for state in ("undisturbed", "disturbed")),
        "rounds": rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("sockets", 2000), ("readers", 48), ("agents", 8), ("rounds", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--disturb", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.disturb:
        disturb(asked.disturb, asked.sockets, asked.readers)
        return
    found = measure(asked)
    print("round  undisturbed   disturbed  ratio  per CPU second  sockets  reopened  worst TTFT")
    for number, one in enumerate(found["rounds"]):
        print(
            f"{number:>5} {one['undisturbed']['tok_s']:>8.1f} t/s {one['disturbed']['tok_s']:>6.1f} t/s "
            f"{one['ratio']:>6.3f} {one['cpu_ratio']:>15.3f} {one['open_sockets']:>8} {one['reopened']:>9} "
            f"{one['disturbed']['worst_ttft_s']:>9.2f} s"
        )
    print(
        f"median ratio {found['ratio']:.3f} (wanted: {LEAST}); {found['committed']} of {found['turns']} turns committed"
    )
    print(json.dumps({"benchmark": "idle_sockets"} | found))
    sys.exit(found["ratio"] < LEAST or found["committed"] < found["turns"])


if __name__ == "__main__":
    main()

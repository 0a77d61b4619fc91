"""What everwarm is for, in half a minute: two agents talk with a server, it is killed, and both return.

    python examples/demo.py [MODEL] [--picture FILE.svg]

Starts `everwarm serve` on a free port, tells each agent a story and asks about it (cold), asks again (hot), kills the
server with SIGKILL, starts it again and asks once more (restart). Prints the time to the first token of each answer, as
a client sees it, beside the receipt.
"""

import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from stories import CLOCKMAKER, LIGHTHOUSE

STATES = ("cold", "hot", "restart")
STORIES = {"ada": LIGHTHOUSE, "bob": CLOCKMAKER}
QUESTIONS = {
    "ada": ("What is the name of Mara's dog?", "What was the name of the fishing boat?", "Who was its captain?"),
    "bob": ("What is the name of Emil's granddaughter?", "How old is Emil?", "In which town is the shop?"),
}
PLACES = {"hot": "memory", "warm": "disk", "cold": ""}
ASKED = "You answer questions about this story in one short sentence."

console = Console(record="--picture" in sys.argv, width=100 if "--picture" in sys.argv else None)


class Server:
    """A server process of our own."""

    def __init__(self, model: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "everwarm", "serve", model, "--port", str(self.port)]
        self.started = time.perf_counter()
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        while True:
            try:
                with self.open("/health"):
                    return
            except (urllib.error.URLError, ConnectionError):
                if self.process.poll() is not None:
                    assert self.process.stderr is not None
                    sys.exit(self.process.stderr.read().decode())
                time.sleep(0.02)

    def open(self, path: str, body: Any = None, method: str | None = None, agent: str = "") -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Agent-Id": agent},
            method=method,
        )
        return urllib.request.urlopen(request, timeout=300)

    def end(self, number: int) -> None:
        self.process.send_signal(number)
        self.process.wait()


def ask(server: Server, agent: str, messages: list[dict[str, str]]) -> tuple[str, float, dict[str, Any]]:
    """The answer, seconds to its first text, the receipt."""
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, "stream": True, "stop": ["\n"]}
    started, first, text, receipt = time.perf_counter(), 0.0, "", {}
    with server.open("/v1/chat/completions", body, agent=agent) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk["choices"]:
                said = choice["delta"].get("content") or ""
                first = first or (time.perf_counter() - started if said else 0.0)
                text += said
            receipt = chunk.get("everwarm") or receipt
    return text, first, receipt


def main() -> None:
    arguments = sys.argv[1:]
    picture = arguments.pop(arguments.index("--picture") + 1) if "--picture" in arguments else None
    model = next((one for one in arguments if not one.startswith("--")), "smollm2")
    suffix = secrets.token_hex(3)  # nobody else's agents
    table = Table("agent", "state", "first token", "prompt tokens", "reused", "from", title="time to first token")
    talks = {
        name: [{"role": "system", "content": f"({name} {suffix}) {ASKED}\n\n{story}"}]  # begins like no other
        for name, story in STORIES.items()
    }
    server = Server(model)
    console.print(f"server is ready after {time.perf_counter() - server.started:.1f} s", style="dim")
    try:
        for number, state in enumerate(STATES):
            if state == "restart":
                console.print("\nkill -9", style="bold red")
                server.end(signal.SIGKILL)
                server = Server(model)
                console.print(f"server is ready again after {time.perf_counter() - server.started:.1f} s", style="dim")
            for name, messages in talks.items():
                question, agent = QUESTIONS[name][number], f"{name}-{suffix}"
                messages.append({"role": "user", "content": question})
                text, first, receipt = ask(server, agent, messages)
                messages.append({"role": "assistant", "content": text})
                console.print(f"[bold]{agent}[/bold] ({state}): {question}", highlight=False)
                console.print(f"  {' '.join(text.split())}", markup=False, highlight=False)
                prompt, reused = receipt["prompt_tokens"], receipt["cached_tokens"]
                place = (
                    PLACES[receipt["tier"]] if reused > prompt / 100 else ""
                )  # the template's first words don't count
                table.add_row(agent, state, f"{1000 * first:,.0f} ms", f"{prompt:,}", f"{reused:,}", place)
        console.print()
        console.print(table)
        for name in talks:
            server.open(f"/v1/agents/{name}-{suffix}", method="DELETE").close()
        console.print(
            "\nTalk to agents and see what is reused: run [bold]make serve[/bold], then open http://127.0.0.1:8080/"
        )
        if picture is not None:
            svg = console.export_svg(title="make demo")
            Path(picture).write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))  # no font from elsewhere
    finally:
        server.end(signal.SIGTERM)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()

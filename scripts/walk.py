"""Draw the walk of one request through the Python files of everwarm, from the socket to the last token.

A server runs in this process. After two requests that warm it up, one streamed chat request of a new agent is traced:
on the event loop, on the threads of requests and on the engine's thread. Printed are

- the files in the order in which the request first enters them, each with the file that called it. A file marked `*` is
  one that the request goes through: from it, another file is entered for the first time. All others do their work and
  return;
- files that are entered again: groups of files that call each other, directly or through others. A file that is called
  several times from the same side is not entered again; a file that a later layer calls back is.

A call is attributed to the nearest caller of ours. Calls that come from the web framework or from the event loop have
no caller: a message that travels through ASGI's `receive` and `send` is not a call from one layer to another.

    python scripts/walk.py MODEL.gguf [--json]
"""

import argparse
import json
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import everwarm

ROOT = str(Path(everwarm.__file__).parent) + os.sep
THREADS = ("MainThread", "everwarm-http", "everwarm-text", "everwarm-long-text", "everwarm-request", "everwarm-engine")
"""Threads that work for a request. Others (the writer of blocks, readers of weights) work for everyone."""

SEEN_THROUGH = ("contextlib.py", "functools.py", "threading.py", "abc.py", "dataclasses.py")
"""Modules of the standard library that call on behalf of their caller."""


IGNORED = ("<module>", "<genexpr>", "receive", "send")
"""Not calls: imports, generators that were handed over as values, messages that travel through ASGI."""


class Walk:
    """Who calls whom while `recording`."""

    def __init__(self) -> None:
        self.recording = False
        self.entered: dict[str, str] = {}  # file: who called it first, in order
        self.calls: dict[str, set[str]] = defaultdict(set)
        self.example: dict[tuple[str, str], str] = {}

    def profile(self, frame: FrameType, event: str, argument: object) -> None:
        if not self.recording or event != "call":
            return
        name = _file(frame)
        if name is None or frame.f_code.co_name in IGNORED:
            return
        thread = threading.current_thread().name
        if not thread.startswith(THREADS):
            return
        caller = _caller(frame)
        if caller == name:
            return
        self.entered.setdefault(name, caller or f"({thread})")
        if caller is not None:
            self.calls[caller].add(name)
            self.example.setdefault((caller, name), frame.f_code.co_qualname)

    @property
    def passed(self) -> list[str]:
        """Files from which another file is entered for the first time."""
        callers = set(self.entered.values())
        return [name for name in self.entered if name in callers]

    def circles(self) -> list[list[str]]:
        """Groups of files that call each other (strongly connected components of the graph of calls)."""
        reach = {name: self._reached(name) for name in self.entered}
        groups: list[list[str]] = []
        for name in self.entered:
            if any(name in group for group in groups):
                continue
            group = [other for other in self.entered if other in reach[name] and name in reach[other]]
            if len(group) > 1:
                groups.append(group)
        return groups

    def _reached(self, start: str) -> set[str]:
        reached: set[str] = set()
        left = [start]
        while left:
            for name in self.calls[left.pop()] - reached:
                reached.add(name)
                left.append(name)
        return reached

    def back_calls(self, group: list[str]) -> list[str]:
        """Inside a group: calls into a file that was entered before its caller."""
        order = list(self.entered)
        return [
            f"{caller} -> {called} ({self.example[caller, called]})"
            for caller in group
            for called in sorted(self.calls[caller] & set(group))
            if order.index(called) < order.index(caller)
        ]


def _file(frame: FrameType) -> str | None:
    name = frame.f_code.co_filename
    return name[len(ROOT) :] if name.startswith(ROOT) else None


def _caller(frame: FrameType) -> str | None:
    """The nearest file of ours that the call comes from."""
    back = frame.f_back
    while back is not None:
        if (name := _file(back)) is not None:
            return name
        if not back.f_code.co_filename.endswith(SEEN_THROUGH):
            return None
        back = back.f_back
    return None


def trace(model: str) -> Walk:
    """Serve a model, and trace one request."""
    import httpx

    walk = Walk()
    threading.setprofile(walk.profile)
    from everwarm.server.app import create_app
    from everwarm.server.http import HttpServer

    with everwarm.load(model, threads=2) as llm, socket.create_server(("127.0.0.1", 0)) as listener:
        app = create_app(llm, "model")
        server = HttpServer(app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="everwarm-http")
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions"
            for number in range(3):
                body = {
                    "messages": [{"role": "user", "content": f"Count to {number}, please."}],
                    "max_tokens": 16,
                    "stream": True,
                    "everwarm": {"agent": f"walk {uuid.uuid4().hex}"},
                }
                time.sleep(0.2)  # what the request before has left to do
                walk.recording = number == 2
                answer = httpx.post(url, json=body, timeout=600)
                answer.raise_for_status()
            time.sleep(0.2)  # the request's line in the log
            walk.recording = False
        finally:
            server.should_exit = True
            thread.join()
            app.state.serving.close()
    return walk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file, or a name that was pulled")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        model = str(Path(options.model).resolve()) if Path(options.model).exists() else options.model
        if model != options.model or Path(model).exists():
            os.environ["EVERWARM_HOME"] = home
        walk = trace(model)
    circles = walk.circles()
    if options.json:
        found: dict[str, Any] = {
            "entered": walk.entered,
            "passed": walk.passed,
            "circles": circles,
        }
        print(json.dumps(found))
        return
    passed = set(walk.passed)
    for number, (name, caller) in enumerate(walk.entered.items(), 1):
        print(f"{number:3}  {'*' if name in passed else ' '} {name:34} from {caller}")
    calling = sum(bool(walk.calls[name]) for name in walk.entered)
    print(f"\n{len(passed)} files that the request goes through (*), of {len(walk.entered)} that it enters;")
    print(f"{calling} of these call any other file")
    for group in circles:
        print(f"entered again: {', '.join(group)}")
        for call in walk.back_calls(group):
            print(f"    {call}")
    if not circles:
        print("no file is entered again")


if __name__ == "__main__":
    sys.exit(main())

"""A proxy that makes a program's first request of a task a tool call, and lets the model answer from the result.

    python scripts/force_tool_choice.py --to http://127.0.0.1:8080 --port 8081 --tool Read

A model of 1.5B often does not call a tool by itself, or goes on calling for ever. The agent programs have no setting
for `tool_choice`, so this one sets it for them: the named tool while no result is there since the user's last words,
none as soon as there is one. Nothing else is changed. Each request's choice is printed. For trying programs
(docs/clients.md); not a part of everwarm.
"""

import argparse
import http.client
import json
import sys
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RESULTS = {"tool_result", "function_call_output", "custom_tool_call_output"}
HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


def has_result(items: list[dict[str, Any]]) -> bool:
    """Whether a tool has answered since the user's last words."""
    for item in reversed(items):
        if item.get("role") == "tool" or item.get("type") in RESULTS:
            return True
        content = item.get("content")
        kinds = {part.get("type") for part in content if isinstance(part, dict)} if isinstance(content, list) else set()
        if kinds & RESULTS:
            return True
        if item.get("role") == "user":
            return False
    return False


def tool_names(body: dict[str, Any]) -> set[str]:
    return {tool.get("name") or tool.get("function", {}).get("name", "") for tool in body.get("tools") or ()}


def choice(path: str, body: dict[str, Any], tool: str) -> Any:
    """The `tool_choice` in the words of the API that is spoken."""
    items = body.get("messages") or body.get("input")
    done = isinstance(items, list) and has_result(items)
    if path.endswith("/messages"):
        return {"type": "none"} if done else {"type": "tool", "name": tool}
    if done:
        return "none"
    if path.endswith("/responses"):
        return {"type": "function", "name": tool}
    return {"type": "function", "function": {"name": tool}}


class Handler(BaseHTTPRequestHandler):
    to: urllib.parse.SplitResult
    tool: str
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._pass_on(b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        try:
            parsed = json.loads(body)
        except ValueError:
            parsed = None
        path = urllib.parse.urlsplit(self.path).path
        generates = path.endswith(("/messages", "/chat/completions", "/responses"))
        if generates and isinstance(parsed, dict) and self.tool in tool_names(parsed):
            parsed["tool_choice"] = choice(path, parsed, self.tool)
            print(path, json.dumps(parsed["tool_choice"]), flush=True)
            body = json.dumps(parsed).encode()
        self._pass_on(body)

    def _pass_on(self, body: bytes) -> None:
        upstream = http.client.HTTPConnection(self.to.hostname or "", self.to.port or 80)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
        upstream.request(self.command, self.path, body or None, headers)
        answer = upstream.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in HOP_BY_HOP:
                self.send_header(name, value)
        self.send_header("connection", "close")
        self.end_headers()
        while chunk := answer.read1(65536):
            self.wfile.write(chunk)
            self.wfile.flush()
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", required=True, help="address of everwarm serve")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tool", required=True, help="name of the tool that is called first")
    given = parser.parse_args()
    Handler.to, Handler.tool = urllib.parse.urlsplit(given.to), given.tool
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())

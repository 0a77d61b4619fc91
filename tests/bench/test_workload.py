"""Decode on the work of agents: what is asked, and what is printed. Timing itself decides nothing here."""

import json
import stat
from pathlib import Path

import pytest

from everwarm.bench.agentic.workloads import WORKLOADS
from everwarm.cli.app import run
from tiny import Tiny

STAND_IN = '''#!{python}
"""A llama-server that says it is fast."""
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

FLAGS = sys.argv[1:]


class Handler(BaseHTTPRequestHandler):
    def answer(self, body):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):
        self.answer({{}})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["prompt"] and asked["n_predict"]
        drafts = {{"draft_n": 10, "draft_n_accepted": 5}} if "--spec-type" in FLAGS else {{}}
        self.answer({{"timings": {{"predicted_per_second": 1000.0 + 100 * bool(drafts)}} | drafts}})

    def log_message(self, *_):
        pass


HTTPServer(("127.0.0.1", int(FLAGS[FLAGS.index("--port") + 1])), Handler).serve_forever()
'''


@pytest.fixture
def tiny(tmp_path: Path, home: Path) -> Path:
    Tiny(context=8192, type="Q4_0").write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def bench(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], str]:
    capfd.readouterr()
    code = run(["bench", "speed", *map(str, arguments)])
    captured = capfd.readouterr()
    return code, captured.out.splitlines(), captured.err


def test_tasks_are_the_same_each_time_and_differ_between_agents() -> None:
    for make in WORKLOADS.values():
        assert make(3) == make(3)
        assert len({json.dumps(make(number).messages) for number in range(4)}) == 4


def test_a_table_then_one_line_of_json(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = bench(capfd, tiny, "--workload", "edit,prose", "--decode-tokens", 8, "--runs", 2, "--agents", 2)
    assert code == 0
    report = json.loads(lines[-1])
    assert [row["work"] for row in report["rows"]] == ["edit", "prose"]
    for row in report["rows"]:
        assert row["same_tokens"]
        assert row["tokens"] == 16
        assert [len(runs) for runs in row["runs"]] == [2, 2]
    assert report["llama.cpp"] == []
    assert any(line.startswith("edit") for line in lines)


def test_each_kind_of_the_peers_drafts_is_measured(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    server = tmp_path / "llama-server"
    server.write_text(STAND_IN.format(python=sys.executable))
    server.chmod(server.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("EVERWARM_LLAMA_SERVER", str(server))
    code, lines, _ = bench(
        capfd, tiny, "--workload", "tool", "--decode-tokens", 4, "--runs", 1, "--peer", "llama.cpp", "--json"
    )
    assert code == 0
    (report,) = map(json.loads, lines)
    found = {one["kind"]: (one["tok_s"], one["drafted"], one["accepted"]) for one in report["llama.cpp"]}
    assert found.pop("without drafts") == (1000.0, 0, 0)
    assert set(found.values()) == {(1100.0, 10, 5)}


def test_an_unknown_workload_is_one_line(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _, err = bench(capfd, tiny, "--workload", "edit,dance")
    assert code == 2
    assert "dance" in err
    assert err.count("\n") == 1

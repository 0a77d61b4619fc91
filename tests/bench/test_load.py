"""The benchmark of many agents: that it measures what it says. Timing decides nothing."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everwarm.bench.load import client as load_client
from everwarm.bench.load import report as load_report
from everwarm.bench.load import server as load_server
from everwarm.bench.load.client import Heard
from everwarm.bench.load.load import LoadOptions, Run, whole_context, write_script
from everwarm.bench.load.server import ServerProcess
from everwarm.errors import ConfigError
from tiny import Tiny

Call = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def tiny(tmp_path: Path, home: Path) -> Path:
    Tiny(type="Q4_0", context=1024).write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def server(tiny: Path, home: Path) -> Iterator[ServerProcess]:
    with load_server.everwarm(tiny, home, {"warm": "on"}) as started:
        yield started


@pytest.mark.slow
def test_a_server_is_started_and_every_turn_is_counted(tiny: Path, home: Path, tmp_path: Path, bench: Call) -> None:
    picture = tmp_path / "load.png"
    code, lines, said = bench(
        "load", tiny, "--agents", 3, "--turns", 2, "--context", 100, "--answer", 8, "--plot", picture
    )
    assert code == 0, said
    report = json.loads(lines[-1])
    (row,) = report["rows"]
    assert (row["server"], row["turns"], row["errors"]) == ("everwarm", 6, {})
    assert row["answer_tokens"] == 6 * 8
    assert row["returning_by_tier"] == {"hot": 1.0}
    assert 0 < row["cached_tokens"] < row["prompt_tokens"]
    for name in ("ttft_first_s", "ttft_returning_s", "inter_token_s"):
        assert 0 <= row[name]["p50"] <= row[name]["p95"] <= row[name]["p99"]
    assert row["decode_tok_s"] > 0
    assert row["prefill_tok_s"] > 0
    assert row["rss_peak_bytes"] > 10 << 20
    assert report["plot"] is None or picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in home.iterdir()) == ["packs"], "its store is a temporary one"


@pytest.mark.slow
def test_openings_are_new_to_a_server_that_runs_already(server: ServerProcess, bench: Call) -> None:
    for _ in range(2):
        code, lines, said = bench(
            "load", "--url", server.url, "--agents", 2, "--turns", 1, "--context", 100, "--answer", 4, "--json"
        )
        assert code == 0, said
        assert len(lines) == 1
        (row,) = json.loads(lines[0])["rows"]
        assert row["errors"] == {}
        assert row["cached_tokens"] < 64 < row["prompt_tokens"]


@pytest.mark.slow
def test_first_tokens_over_http_of_every_state(tiny: Path, bench: Call) -> None:
    code, lines, said = bench("ttft", tiny, "--http", "--contexts", "200", "--runs", 1, "--answer", 4)
    assert code == 0, said
    rows = {row["state"]: row for row in json.loads(lines[-1])["rows"]}
    assert {state: row["tier"] for state, row in rows.items()} == {
        "cold": "cold", "warm": "warm", "hot": "hot", "restart": "warm"
    }  # fmt: skip
    assert [rows[state]["cached_tokens"] for state in rows] == [0, 200, 200, 200]
    assert rows["restart"]["since_start_s"] > rows["restart"]["ttft_s"]


@pytest.mark.slow
def test_first_tokens_of_a_server_that_is_not_ours_are_measured_without_a_restart(
    server: ServerProcess, bench: Call
) -> None:
    code, lines, said = bench("ttft", "--url", server.url, "--contexts", "100", "--runs", 1, "--answer", 4, "--json")
    assert code == 0, said
    assert [row["state"] for row in json.loads(lines[-1])["rows"]] == ["cold", "warm", "hot"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["load"], "either a model"),
        (["load", "m.gguf", "--url", "http://x"], "either a model"),
        (["load", "m.gguf", "--peer", "ollama"], "known is llama.cpp"),
        (["load", "--url", "http://x", "--peer", "llama.cpp"], "not --url"),
        (["load", "--url", "x"], "expected something like"),
        (["load", "m.gguf", "--plot", "x.pdf"], "ends in .png"),
        (["ttft"], "give a model"),
        (["ttft", "m.gguf", "--http", "--peer", "llama.cpp"], "without --url and --http"),
    ],
)
def test_what_can_not_be_done_is_said_first(home: Path, bench: Call, arguments: list[str], told: str) -> None:
    code, _, said = bench(*arguments)
    assert code == 2
    assert told in " ".join(said.split())


def test_a_server_that_does_not_start_is_quoted(home: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"nothing")
    with (
        pytest.raises(ConfigError, match=r"everwarm ended with code \d+: .*bad\.gguf"),
        load_server.everwarm(tmp_path / "bad.gguf", home, {}),
    ):
        pass


def test_deltas_without_text_are_not_first_tokens() -> None:
    heard = Heard(1.0)
    pieces = [
        (2.0, b": keep-alive\n\n"),
        (3.0, _delta(role="assistant", content="")),
        (4.0, _delta(content="a")[:9]),
        (5.0, _delta(content="a")[9:] + _delta(content="b")),
        (6.0, b'data: {"choices": [], "usage": {"completion_tokens": 2, "prompt_tokens": 9}}\n\ndata: [DONE]\n\n'),
    ]
    load_client._understand(pieces, heard)
    assert (heard.text, heard.deltas, heard.ttft_s, heard.gaps_s) == ("ab", [5.0, 5.0], 4.0, [0.0])
    assert (heard.tokens, heard.prompt_tokens, heard.error) == (2, 9, None)


def test_an_error_inside_a_stream_is_an_error_of_the_turn() -> None:
    heard = Heard(0.0)
    load_client._understand([(1.0, b'data: {"error": {"message": "no"}}\n\n')], heard)
    assert heard.error == "no"


def test_throughput_counts_the_time_in_which_somebody_decodes() -> None:
    turns = [_turn(0.0, [1.0, 2.0, 3.0]), _turn(0.0, [2.0, 3.0, 4.0]), _turn(8.0, [9.0, 10.0])]
    assert load_report.decode_tok_s(turns) == 5 / 4  # from 1 to 4, and from 9 to 10
    assert load_report.covered([(0, 2), (1, 3), (5, 6), (5, 5.5)]) == 4


def test_percentiles_are_values_that_were_measured() -> None:
    assert load_report.percentiles(range(1, 101)) == {"p50": 50, "p95": 95, "p99": 99}
    assert load_report.percentiles([7.0]) == {"p50": 7.0, "p95": 7.0, "p99": 7.0}
    assert load_report.percentiles([]) == {}


def test_stalls_and_errors_are_reported_per_server() -> None:
    bad = Heard(0.0, error="503: busy")
    runs = [
        Run("a", 0, 0.0, 10.0, [_turn(0.0, [1.0, 1.1, 1.5]), bad]),
        Run("b", 0, 0.0, 10.0, [_turn(0.0, [1.0, 2.0])]),
    ]
    report = load_report.summarise(runs)
    first, second = report["rows"]
    assert (first["stalls"], first["errors"], first["turns"]) == (1, {"503: busy": 1}, 1)
    assert (second["stalls"], second["errors"]) == (1, {})
    assert report["comparison"]["decode_tok_s_ratio"] == first["decode_tok_s"] / second["decode_tok_s"]


def test_a_script_has_the_length_that_was_asked_for_and_is_the_same_each_time() -> None:
    asked = LoadOptions(agents=3, turns=2, context=500, answer=10)
    script = write_script(asked, lambda said: len(said.split()), (1, 2))
    assert script == write_script(asked, lambda said: len(said.split()), (1, 2))
    assert script.options["logit_bias"] == {"1": -100, "2": -100}
    assert len({opening[:20] for opening in script.openings}) == 3
    for opening, questions in zip(script.openings, script.questions, strict=True):
        assert 400 < len(f"{opening} {questions[0]}".split()) < 600
    assert whole_context(asked, script, lambda said: len(said.split())) > 500 + 2 * 10


def _delta(**delta: str) -> bytes:
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _turn(sent: float, deltas: list[float]) -> Heard:
    return Heard(sent, deltas, deltas[-1], usage={"completion_tokens": len(deltas), "prompt_tokens": 10})

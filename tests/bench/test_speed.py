"""The speed benchmark: what it prints, and that it measures what it says. Timing itself decides nothing here."""

import json
import stat
from pathlib import Path

import pytest

from everwarm.bench.speed import Series, Work
from everwarm.cli.app import run
from everwarm.kernels import _native
from tiny import Tiny


@pytest.fixture
def tiny(tmp_path: Path, home: Path) -> Path:
    Tiny(context=512).write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def speed(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], str]:
    capfd.readouterr()
    code = run(["bench", "speed", *map(str, arguments)])
    captured = capfd.readouterr()
    return code, captured.out.splitlines(), captured.err


def test_a_table_then_one_line_of_json(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = speed(
        capfd, tiny, "--prompt-tokens", "20,40", "--decode-tokens", 3, "--depth", "0,30", "--runs", 2
    )
    assert code == 0
    assert "ceiling" in lines[0]
    report = json.loads(lines[-1])
    assert [row["work"] for row in report["rows"]] == [
        "prefill 20", "prefill 40", "decode 3 at depth 0", "decode 3 at depth 30",
    ]  # fmt: skip
    assert all(len(row["runs"]) == 2 and row["tok_s"] > 0 for row in report["rows"])
    assert report["read_bytes_s"] > 1e8
    assert report["integer_ops_s"] > 1e8


def test_a_row_per_instruction_set_and_one_for_blas(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = speed(capfd, tiny, "--prompt-tokens", 10, "--decode-tokens", 1, "--runs", 1, "--isa", "all", "--json")
    (report,) = map(json.loads, lines)
    runners = {row["runner"] for row in report["rows"]}
    assert runners == {f"everwarm {isa}" for isa in [*_native.supported_isas(), "blas"]}


def test_the_better_of_the_peers_two_ways_is_compared_with(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "llama-bench"  # flash attention on doubles its speed
    stand_in.write_text(
        """#!/bin/sh\ncase "$*" in *"-fa 1"*) n=2000;; *) n=1000;; esac\necho "[{\\"avg_ts\\": $n}]"\n"""
    )
    stand_in.chmod(stand_in.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("EVERWARM_LLAMA_BENCH", str(stand_in))
    _, lines, _ = speed(
        capfd, tiny, "--prompt-tokens", 10, "--decode-tokens", 1, "--runs", 3, "--peer", "llama.cpp", "--json"
    )
    ours, theirs, *_ = json.loads(lines[-1])["rows"]
    assert theirs["runner"] == "llama.cpp fa=1"
    assert theirs["runs"] == [2000.0] * 3
    assert ours["ratio"] == ours["tok_s"] / 2000


def test_median_and_spread() -> None:
    series = Series(Work("prefill", 1), "x", [90.0, 100.0, 130.0])
    assert (series.median, series.spread) == (100.0, 0.2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--peer", "ollama"], "ollama"),
        (["--prompt-tokens", "many"], "--prompt-tokens"),
        (["--prompt-tokens", "0"], "--prompt-tokens"),
        (["--depth", "-1"], "--depth"),
        (["--isa", "sse9"], "sse9"),
    ],
)
def test_bad_arguments_are_one_line(
    tiny: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    code, _, err = speed(capfd, tiny, *arguments)
    assert code == 2
    assert named in err
    assert err.count("\n") == 1


def test_a_missing_peer_says_how_to_get_it(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = speed(capfd, tiny, "--peer", "llama.cpp")
    assert code == 2
    assert "make peers" in err

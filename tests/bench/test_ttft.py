"""The benchmark of time to first token: what it prints, and that it measures what it says. Timing decides nothing."""

import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from everwarm.bench.ttft import disk as ttft_disk
from everwarm.bench.ttft import text as ttft_text
from everwarm.bench.ttft.child import PAIRS, Measured, Setup, _check
from everwarm.bench.ttft.report import exponent, summarise
from everwarm.bench.ttft.ttft import PeerRun, _check_answers
from everwarm.errors import StoreError
from everwarm.kv.warm.restore import READERS
from everwarm.llm import load
from tiny import Tiny


@pytest.fixture
def tiny(tmp_path: Path, home: Path) -> Path:
    Tiny(type="Q4_0", context=512).write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


Call = Callable[..., tuple[int, list[str], str]]


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_every_state_in_a_table_then_one_line_of_json(tiny: Path, home: Path, tmp_path: Path, bench: Call) -> None:
    picture = tmp_path / "ttft.png"
    code, lines, _ = bench(
        "ttft", tiny, "--contexts", "100,300", "--batch-sizes", "1,2", "--runs", 1, "--answer", 3, "--plot", picture
    )
    assert code == 0
    assert "page cache warm" in lines[0]
    report = json.loads(lines[-1])
    assert report["benchmark"] == "ttft"
    found = {(row["context"], row["batch"], row["state"]): row for row in report["rows"]}
    states = ["cold", "off", "warm", "hot", "restart"]
    assert sorted(found) == sorted((c, b, s) for c in (100, 300) for b in (1, 2) for s in states)
    for (context, batch, state), row in found.items():
        known = state in ("warm", "hot", "restart")
        assert row["tier"] == {"off": "cold", "restart": "warm"}.get(state, state)
        assert row["cached_tokens"] == (context if known else 0)
        assert len(row["runs"]) == (PAIRS if state in ("warm", "hot") else 1)
        assert len(row["receipts"]) == batch * len(row["runs"])
        assert len({receipt["tokens_digest"] for receipt in row["receipts"]}) == batch
        assert ("process" in row) == (state == "restart")
        for receipt in row["receipts"]:
            assert receipt["prompt_tokens"] == context + 32
            assert bool(receipt["read_s"] and receipt["verify_s"]) == (row["tier"] == "warm")
            assert receipt["read_s"] + receipt["verify_s"] <= READERS * receipt["restore_s"]
    for one in report["comparisons"]:
        cold, warm = (found[one["context"], one["batch"], state]["ttft_s"] for state in ("cold", "warm"))
        assert one["cold_over_warm"] == cold / warm
        assert one["allowed_s"] > 0.003
        assert len(one["save_overheads"]) == 1
        assert all(value > 0 for value in one["bandwidth"].values())
    assert report["exponents"].keys() >= {"cold", "warm", "hot", "restart"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in home.iterdir()) == ["packs"], "its store is a temporary one"


@pytest.mark.slow
def test_dropped_pages_are_counted_and_json_is_all_there_is_if_asked(tiny: Path, bench: Call) -> None:
    _, lines, _ = bench(
        "ttft", tiny, "--contexts", 128, "--runs", 1, "--states", "warm,hot", "--page-cache", "dropped", "--json"
    )
    (report,) = map(json.loads, lines)
    assert {row["state"] for row in report["rows"]} == {"warm", "hot"}
    assert report["page_cache"]["state"] == "dropped"
    assert report["page_cache"]["verified_by"] == "mincore"
    assert 0 <= report["page_cache"]["resident_share"] <= 1


@pytest.mark.slow
@pytest.mark.usefixtures("forks")
def test_the_better_of_the_peers_two_ways_is_compared_with(
    tiny: Path, tmp_path: Path, bench: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "python"  # flash attention halves its time
    one = '{"flash": %s, "restore_s": 1.0, "copy_s": 0.5, "suffix_s": %s, "bytes": 7}'
    answer = f"[{one % ('false', '3.0')}, {one % ('true', '1.0')}]"
    stand_in.write_text(f"#!/bin/sh\necho '\"ready\"'\nwhile read line; do echo '{answer}'; done\n")
    stand_in.chmod(0o700)
    monkeypatch.setenv("EVERWARM_PEER_PYTHON", str(stand_in))
    _, lines, _ = bench(
        "ttft", tiny, "--contexts", 64, "--runs", 2, "--states", "warm", "--peer", "llama.cpp", "--json"
    )
    report = json.loads(lines[-1])
    (compared,) = report["comparisons"]
    assert (compared["peer"]["flash"], compared["peer"]["ttft_s"]) == (True, 2.0)
    assert compared["warm_over_peer"] == report["rows"][0]["ttft_s"] / 2.0
    assert len(report["rows"][0]["runs"]) == 2 * PAIRS


def test_a_missing_peer_says_how_to_get_it(
    tiny: Path, tmp_path: Path, bench: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = bench("ttft", tiny, "--contexts", 64, "--peer", "llama.cpp")
    assert code == 2
    assert "make peers" in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--contexts", "many"], "--contexts"),
        (["--contexts", "100,500"], "room for 464"),
        (["--batch-sizes", "0"], "--batch-sizes"),
        (["--states", "cold,tepid"], "tepid"),
        (["--page-cache", "cold"], "--page-cache"),
        (["--peer", "ollama"], "ollama"),
        (["--kv-type", "q3"], "q3"),
        (["--plot", "nowhere/t.png"], "nowhere"),
    ],
)
def test_bad_arguments_are_one_line(tiny: Path, bench: Call, arguments: list[str], named: str) -> None:
    code, _, err = bench("ttft", tiny, *arguments)
    assert code == 2
    assert named in err
    assert err.count("\n") == 1


SETUP = Setup("round", "model", 100, [1], ["warm"], 32, 16, 0)
RECEIPT = {"tier": "warm", "cached_tokens": 100, "reason": "extended", "committed": True, "error": None}


@pytest.mark.parametrize(
    "wrong",
    [
        {"tier": "hot"},
        {"tier": "cold", "cached_tokens": 0},
        {"cached_tokens": 64},
        {"committed": False, "error": "full"},
    ],
)
def test_a_receipt_that_says_something_else_ends_it(wrong: dict[str, Any]) -> None:
    _check(SETUP, "warm", RECEIPT)
    with pytest.raises(StoreError, match="context 100, warm"):
        _check(SETUP, "warm", RECEIPT | wrong)


def test_another_answer_than_the_cold_one_ends_it() -> None:
    def said(state: str, *answer: int) -> Measured:
        return Measured(state, 100, 1, answers=[list(answer)], receipts=[{"tokens_digest": "same"}])

    _check_answers([said("cold", 1, 2), said("warm", 1, 2)])
    with pytest.raises(StoreError, match="warm answers otherwise than cold"):
        _check_answers([said("cold", 1, 2), said("warm", 1, 3)])


def test_medians_and_differences() -> None:
    receipt = {
        "tier": "warm", "cached_tokens": 100, "lookup_s": 0.001, "restore_s": 0.01, "read_s": 0.012, "verify_s": 0.004,
        "restored_bytes": 1000, "save_s": 0.1, "saved_bytes": 10,
    }  # fmt: skip

    def one(state: str, ttft: float, last: float = 0.0, **more: Any) -> Measured:
        return Measured(state, 100, 1, [ttft], last, [[1]], [receipt], **more)

    bandwidth = dict.fromkeys(["read_recycled", "read_fresh", "hash_recycled", "hash_fresh"], 1e6)
    found = [one("cold", 3.0, 4.4), one("cold", 2.0, 3.0), one("cold", 9.0, 3.3)]
    found += [one("off", 1.0, 4.0), one("off", 1.0, 3.0), one("off", 1.0, 3.0)]
    found += [one("warm", 0.5), one("warm", 0.7), one("warm", 0.6)]
    found += [one("hot", 0.4), one("hot", 0.5), one("hot", 0.3)]
    found += [Measured("bandwidth", 100, 1, bandwidth=bandwidth)]
    peers = [PeerRun(100, flash, 0.5, 0.1, 0.5 + flash, 7) for flash in (False, True)]
    (compared,) = summarise(found, peers)["comparisons"]
    assert compared["cold_over_warm"] == 3.0 / 0.6
    assert compared["warm_minus_hot_s"] == pytest.approx(0.2)  # the median of 0.1, 0.2, 0.3
    assert compared["allowed_s"] == pytest.approx(1.3 * 1000 / 1e6 + 0.003)
    assert compared["within_bound"] is False
    assert compared["save_overhead"] == pytest.approx(0.1)  # the median of 10 %, 0, 10 %
    assert compared["warm_over_peer"] == 0.6 / 1.0


def test_the_exponent_of_a_power_law() -> None:
    contexts = [1000, 2000, 5000]
    assert exponent(contexts, [0.3 * context**1.7 for context in contexts]) == pytest.approx(1.7)


def result(tmp_path: Path, *rows: tuple[int, str, float]) -> Path:
    said = [{"context": context, "batch": 1, "state": state, "ttft_s": seconds} for context, state, seconds in rows]
    path = tmp_path / "result.txt"
    path.write_text("a table\n\n" + json.dumps({"benchmark": "ttft", "rows": said}) + "\n")
    return path


def test_validate_accepts_what_is_fast_enough(tmp_path: Path, bench: Call) -> None:
    path = result(tmp_path, (1024, "cold", 3.0), (1024, "warm", 2.0), (1024, "restart", 1.0), (1024, "hot", 9.0))
    code, lines, err = bench("validate", path)
    assert (code, err) == (0, "")
    assert len(lines) == 2


def test_validate_names_each_context_that_is_too_slow(tmp_path: Path, bench: Call) -> None:
    rows = [(1024, "cold", 3.0), (1024, "warm", 2.1), (4096, "cold", 9.0), (4096, "warm", 1.0), (4096, "restart", 8.0)]
    code, lines, err = bench("validate", result(tmp_path, *rows))
    assert code == 1
    assert [line.split(":")[0] for line in lines] == ["context 4096, batch 1"]
    slow = err.splitlines()
    assert len(slow) == 2
    assert "context 1024" in slow[0]
    assert "warm" in slow[0]
    assert "context 4096" in slow[1]
    assert "restart" in slow[1]
    assert bench("validate", result(tmp_path, *rows), "--min-speedup", 1.01)[0] == 0


@pytest.mark.parametrize(
    "text", ["", "no json", "[1]", '{"benchmark": "speed", "rows": []}', '{"benchmark": "ttft", "rows": [{}]}', "{}"]
)
def test_validate_refuses_other_files_in_one_line(tmp_path: Path, bench: Call, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    code, _, err = bench("validate", path)
    assert code == 2
    assert err.count("\n") == 1


def test_validate_needs_something_to_compare(tmp_path: Path, bench: Call) -> None:
    code, _, err = bench("validate", result(tmp_path, (1024, "warm", 2.0)))
    assert code == 2
    assert "nothing can be compared" in err


def test_residency_is_counted_in_pages_and_drops_are_believed_only_if_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(5 * mmap.PAGESIZE - 100))
    path.read_bytes()
    assert ttft_disk.resident([path]) == 5 * mmap.PAGESIZE
    dropped = ttft_disk.drop([path])
    assert dropped.file_bytes == 5 * mmap.PAGESIZE - 100
    assert dropped.resident_bytes == ttft_disk.resident([path])


def test_prompts_are_the_same_each_time_and_none_begins_like_another(tiny: Path) -> None:
    with load(tiny, warm="off") as llm:
        made = [ttft_text.tokens(llm, 200, number) for number in range(1, 9)]
        assert made == [ttft_text.tokens(llm, 200, number) for number in range(1, 9)]
        assert all(len(ids) == 200 for ids in made)
        assert len({ids[0] for ids in made}) == 8

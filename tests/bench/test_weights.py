"""The weights benchmark: what it prints, and that it measures what it says. Timing itself decides nothing here."""

import builtins
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everwarm.bench.weights.optimum import optimum
from everwarm.bench.weights.row import FORMS, Row, Setup, measure
from everwarm.bench.weights.traces import (
    StandIn,
    record_pass,
    record_requests,
    replay,
    share_of_hot_experts,
    synthetic_rows,
)
from everwarm.bench.weights.weights import recommend, slowest_window, variation
from everwarm.cli.app import run
from everwarm.errors import ConfigError
from everwarm.llm import load
from everwarm.weights.cache.cache import WeightCache
from everwarm.weights.cache.place import is_expert, largest_layer, ring_bytes, stages
from everwarm.weights.cache.policy import POLICIES
from golden.oracles.cases import CASES
from tiny import Tiny
from waiting_until import wait_until

LAYERS = 8


@pytest.fixture
def tiny(tmp_path: Path, home: Path) -> Path:
    Tiny(type="Q4_0", layers=LAYERS, context=512).write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def weights(capfd: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[str], str]:
    capfd.readouterr()
    code = run(["bench", "weights", *map(str, arguments)])
    captured = capfd.readouterr()
    return code, captured.out.splitlines(), captured.err


@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize("form", ["packed", "f32"])
def test_tables_then_one_line_of_json(tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], form: str) -> None:
    picture = tmp_path / "weights.png"
    code, lines, _ = weights(
        capfd, tiny, "--form", form, "--budgets", "0.5,1", "--passes", 6, "--prefetch-ahead", "0,1", "--plot", picture
    )
    assert code == 0
    report = json.loads(lines[-1])
    assert (report["benchmark"], report["form"], report["tensors"]) == ("weights", form, 9 * LAYERS + 2)
    assert all(access["same_memory"] and access["hit_ns"] > 0 for access in report["access"])
    uncached = ["no cache: file", "no cache: pack"] if form == "packed" else ["no cache: file"]
    assert [row["name"] for row in report["rows"]] == [*uncached, "value", "lru", "pinned-prefix", "all kept"]
    for one in (row["row"] for row in report["rows"]):
        assert one["tok_s"] > 0
        assert one["peak_rss"] >= one["import_rss"] > 0
        assert one["hit_rate"] + one["ring_rate"] + one["miss_rate"] == pytest.approx(1)
    assert report["rows"][-1]["row"]["hit_rate"] == 1
    assert [one["ahead"] for one in report["prefetch"]] == [0, 1]
    assert report["prefetch"][0]["ring_rate"] == 0  # nothing is read ahead
    assert report["recommended_ahead"] in (0, 1)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert any("recommended" in line for line in lines)


def test_no_policy_hits_more_than_the_optimum(tiny: Path) -> None:
    with load(tiny) as llm:
        sizes = dict(llm.weights._source.sizes)
    for row in synthetic_rows(sizes, [0.3, 0.6]):
        assert 0 <= row.hit_rate <= row.optimum + 1e-9, row
        if row.trace == "scan":
            assert row.hit_rate == 0 if row.policy == "lru" else row.hit_rate > 0.9 * row.optimum


def test_a_replay_is_the_same_every_time(tiny: Path) -> None:
    with load(tiny) as llm:
        sizes = dict(llm.weights._source.sizes)
    assert synthetic_rows(sizes, [0.4]) == synthetic_rows(sizes, [0.4])


def test_warm_up_does_not_count() -> None:
    sizes = {f"blk.{layer}.x": 10 for layer in range(4)}
    counts = replay(list(sizes) * 32, sizes, 40, "value")
    assert (counts.misses, counts.hits) == (0, 4 * 16)


def test_the_trace_of_a_pass_is_the_models_own(tiny: Path) -> None:
    with load(tiny) as llm:
        trace = record_pass(llm)
        assert llm.weights.stats().uses == 0
        assert sorted(set(trace)) == sorted(llm._file.tensors)
    assert len(trace) == len(set(trace)) == 9 * LAYERS + 2  # to look up some rows is no use of the whole embedding
    assert (trace[0], trace[-1]) == ("blk.0.attn_norm.weight", "token_embd.weight")


def test_the_trace_of_requests_is_that_of_their_passes(tiny: Path) -> None:
    with load(tiny) as llm:
        one = record_pass(llm)
        trace = record_requests(llm, prompt_tokens=8, passes=6)
    assert trace.names == one * (2 * 4 + 3 * 2)  # a token for each pass, and the first one comes out of the prompt's
    assert trace.warmup == len(one) * 2 * 4


@pytest.fixture
def experts(tmp_path: Path, home: Path) -> Path:
    (case,) = [case for case in CASES if case.name == "qwen3moe"]
    return case.unpack(tmp_path)


def test_of_experts_the_trace_has_those_that_were_chosen(experts: Path) -> None:
    with load(experts) as llm:
        spec = llm.config.layers[-1].feed_forward.experts
        assert spec is not None
        trace = record_requests(llm, prompt_tokens=1, passes=6)
        last = [
            name for name in trace.names if is_expert(name) and name.startswith(f"blk.{len(llm.config.layers) - 1}.")
        ]
    assert len(last) == (2 * 4 + 3 * 2) * spec.used * 3  # gate, up and down of each that a token takes
    assert len(set(last)) > spec.used * 3  # not always the same


def test_the_share_of_the_hot_quarter() -> None:
    names = [f"blk.0.ffn_up.{number}.weight" for number in range(8)]
    assert share_of_hot_experts([*names, "blk.0.attn_q.weight"], names) == 0.25
    assert share_of_hot_experts(names[:2] * 3 + names[2:4], names) == 0.75
    assert share_of_hot_experts(["blk.0.attn_q.weight"], ["blk.0.attn_q.weight"]) is None


def test_a_model_with_experts_is_measured_beside_its_own_optimum(
    experts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with load(experts) as llm:
        sizes = dict(llm._source.sizes)
    share = round(largest_layer(sizes) / sum(sizes.values()) + 0.01, 2)
    code, lines, _ = weights(capfd, experts, "--budgets", share, "--passes", 6, "--prefetch-ahead", "1")
    assert code == 0
    assert any("fall on the quarter" in line for line in lines)
    report = json.loads(lines[-1])
    assert 0.25 <= report["hot_experts"] <= 1
    for row in report["rows"]:
        if row["budget"]:
            assert row["row"]["hit_rate"] <= row["optimum"] + 1e-9


def test_lru_hits_nothing_on_real_passes(tiny: Path) -> None:
    with load(tiny) as llm:
        budget = llm.weights.total_bytes // 2
    assert measure(Setup(str(tiny), "packed", budget, "lru", 1, 12, 4)).hit_rate == 0


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.usefixtures("forks")
@pytest.mark.parametrize(("form", "shares"), [("packed", (0.25, 0.5, 0.75)), ("f32", (0.25,))])
def test_value_is_near_the_optimum_on_real_passes(smollm2_path: Path, form: str, shares: tuple[float, ...]) -> None:
    """In a model whose tied embedding is larger than the smallest of these budgets. A policy sees sizes and uses only,
    and a pass in f32 takes seconds: one budget is enough there.
    """
    with load(smollm2_path, backend=FORMS[form]) as llm:
        sizes, trace = dict(llm._source.sizes), record_pass(llm)
    for share in shares:
        budget = int(share * sum(sizes.values()))
        best = optimum(trace * 20, sizes, budget, len(trace))
        row = measure(Setup(str(smollm2_path), form, budget, "value", 1, 6, 4))
        assert 0.95 * best <= row.hit_rate <= best + 1e-9
        assert row.peak_weights <= budget + ring_bytes([sum(map(sizes.get, stage)) for stage in stages(sizes)[0]], 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_use_of_what_was_read_ahead_is_no_hit(policy: str) -> None:
    """Even if it is kept from then on: its bytes were read for that use."""
    sizes = {f"blk.{layer}.x": 10 for layer in range(4)}
    cache = WeightCache(StandIn(sizes), 20, policy)
    cache.prefetch(1)
    wait_until(lambda: cache.stats().materialise_s)
    cache.get("blk.1.x")
    first = cache.stats()
    cache.get("blk.1.x")
    counts = cache.stats() - first
    cache.close()
    assert (first.hits, first.prefetch_hits, first.misses) == (0, 1, 0)
    assert (counts.hits, counts.prefetch_hits, counts.misses) == (1, 0, 0)


def test_a_row_that_fails_says_why(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="largest layer"):
        measure(Setup(str(tiny), "packed", 10, "value", 1, 4, 4))


def test_steady_requests(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = weights(capfd, tiny, "--steady", 4, "--passes", 5, "--prompt-tokens", 20)
    assert code == 0
    assert "first token" in lines[0]
    report = json.loads(lines[-1])
    assert len(report["requests"]) == 4
    assert all(one["prefill_tok_s"] > 0 and one["tok_s"] > 0 for one in report["requests"])
    assert report["misses"] == 0
    assert report["decode_limit_tok_s"] > 0
    assert report["machine_variation"] >= 0
    assert len(report["instances"]) == 1
    assert report["problems"] == []


def test_json_is_all_there_is_if_asked(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, lines, _ = weights(capfd, tiny, "--steady", 2, "--passes", 2, "--json")
    (report,) = map(json.loads, lines)
    assert report["benchmark"] == "weights steady"


@pytest.mark.usefixtures("forks")
def test_without_matplotlib_there_is_no_plot_but_all_the_rest(
    tiny: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    code, lines, err = weights(
        capfd, tiny, "--budgets", 1, "--passes", 2, "--prefetch-ahead", 0, "--plot", tmp_path / "w.png", "--json"
    )
    assert code == 0
    assert "everwarm[plot]" in err
    assert err.count("\n") == 1
    assert json.loads(lines[-1])["plot"] is None


def test_the_smallest_that_is_nearly_the_fastest_is_recommended() -> None:
    row = Row("value", 1, 0, *[0.0] * 10, *[0] * 7)
    rows = [replace(row, ahead=ahead, tok_s=speed) for ahead, speed in [(0, 90.0), (1, 98.0), (2, 97.5), (4, 100.0)]]
    assert recommend(rows) == 1
    assert recommend([]) is None


def test_the_slowest_window_is_measured_against_the_growing_context() -> None:
    times = [0.0]
    for token in range(2000):
        times.append(times[-1] + 0.01 + token * 1e-5)
    assert slowest_window(times) == pytest.approx(1.0, abs=1e-3)
    late = [at + (0.5 if number > 700 else 0.0) for number, at in enumerate(times)]  # a pause of half a second
    took = times[800] - times[700]
    assert slowest_window(late) == pytest.approx(1 + 0.5 / took, rel=0.02)
    assert slowest_window(times[:300]) is None


def test_variation() -> None:
    assert variation([5.0, 5.0]) == 0
    assert variation([90.0, 110.0]) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--budgets", "0"], "--budgets"),
        (["--budgets", "1.5"], "--budgets"),
        (["--budgets", "half"], "--budgets"),
        (["--budgets", "0.01"], "largest layer"),
        (["--form", "f64"], "f64"),
        (["--prefetch-ahead", "-1"], "--prefetch-ahead"),
        (["--plot", "nowhere/w.png"], "nowhere"),
        (["--plot", "w.txt"], "w.txt"),
    ],
)
def test_bad_arguments_are_one_line(
    tiny: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    code, _, err = weights(capfd, tiny, *arguments)
    assert code == 2
    assert named in err
    assert err.count("\n") == 1

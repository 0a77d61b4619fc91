"""Real restarts: agents talk, processes die. What is asked of them stands in `torture.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import everwarm
from kv.torture import AGENTS, COPY, Book, Plan, check_files, run_life, write_tiny
from short_and_long import short_and_long


def tortured(cycles: int, model: str) -> dict[str, int]:
    """In a process of its own, which has no threads: it forks. Returns its counts."""
    command = [sys.executable, Path(__file__).with_name("torture.py"), str(cycles), "--model", model]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    counts: dict[str, int] = json.loads(run.stdout.splitlines()[-1])
    return counts


@pytest.mark.slow
@short_and_long("cycles", 60, 1000)
def test_processes_that_are_killed_leave_every_acknowledged_turn_behind(cycles: int) -> None:
    counts = tortured(cycles, "tiny")
    # What was meant to happen did happen. How often depends on the machine: the instants of death are in seconds.
    assert counts["cycles"] == cycles
    assert counts["wrong answers"] == counts["lost acknowledged turns"] == 0
    assert min(counts["lives with faults"], counts["restore auto"], counts["restore always"]) > cycles / 4
    assert counts["killed"] > 0.8 * cycles
    assert counts["acknowledged"] > cycles / 10
    assert counts["warm turns"] > cycles / 20
    assert counts["tokens compared"] > cycles
    assert counts["fresh interpreters"] == cycles // 30
    if cycles >= 1000:  # these are rare
        assert counts["reused blocks of turns that nobody owns"] > 0
        assert counts["found one that was not acknowledged"] > 0


@pytest.mark.slow
@short_and_long("cycles", 20, 500)
def test_processes_with_a_hybrid_model_that_are_killed_leave_every_acknowledged_turn_behind(cycles: int) -> None:
    counts = tortured(cycles, "hybrid")
    assert counts["cycles"] == cycles
    assert counts["wrong answers"] == counts["lost acknowledged turns"] == 0
    assert counts["killed"] > 0.8 * cycles
    assert min(counts["acknowledged"], counts["warm turns"], counts["tokens compared"]) > 0


@pytest.mark.parametrize("ending", ["close", "exit", "term"])
@pytest.mark.parametrize("durability", ["async", "turn"])
def test_a_process_that_ends_by_itself_leaves_everything_behind(home: Path, ending: str, durability: str) -> None:
    """`term`: SIGTERM as the command line handles it. Nothing is flushed but by the end itself."""
    home.mkdir()
    model = home / "tiny.gguf"
    write_tiny(model)
    book = Book()
    run_life(Plan(str(model), 4, durability, "64MiB", 8, 0.02, ending), book, None, fresh=True)
    if durability == "turn":  # with `async`, the last one is usually on its way
        assert book.counts["turns on their way to the disk at the end"] == 0
    with everwarm.load(model, warm="on") as llm:
        for name in [*AGENTS, COPY]:
            agent = llm.agents.agents.by_name.get(("default", name))
            book.note({"found": name, "ids": None if agent is None else llm.agents.history(agent).ids})
    assert book.wrong == []
    assert book.counts["histories found"] == 8
    assert check_files(home) > 3

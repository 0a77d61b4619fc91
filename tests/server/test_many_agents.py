"""Many agents at once, with memory for a few: what each says is what it says when it is alone with the model."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import LETTERS, process

import everwarm
from short_and_long import short_and_long
from tiny import Tiny

TOKENS = 12


def talk(url: str, number: int, options: dict[str, Any], turns: int) -> list[str]:
    """All turns of one agent: what it said."""
    messages: list[dict[str, str]] = [{"role": "system", "content": f"You are agent {number}. " + "Be brief. " * 6}]
    said = []
    with httpx.Client(base_url=url, timeout=300) as client:
        for turn in range(turns):
            messages.append({"role": "user", "content": f"{turn}. Tell me of the number {number * 7 + turn}."})
            body = {"messages": messages, "temperature": 0, "max_tokens": TOKENS, **options}
            answer = client.post("/v1/chat/completions", json=body, headers={"X-Agent-Id": f"agent-{number}"})
            assert answer.status_code == 200, answer.text
            receipt = answer.json()["everwarm"]
            assert receipt["committed"]
            said.append(answer.json()["choices"][0]["message"]["content"])
            messages.append({"role": "assistant", "content": said[-1]})
    return said


def metric(url: str, name: str) -> float:
    found = re.search(rf"^everwarm_{name} (\S+)", httpx.get(url + "/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


def at_once_and_one_by_one(
    path: Path, home: Path, budget: int, options: dict[str, Any], agents: int, turns: int
) -> float:
    """Compare; returns by how much the process grew while all talked."""
    flags = ("--kv-budget", str(budget), "--context", "2048", "--restore", "always")
    with process(path, *flags, home=home / "all") as url:
        before = metric(url, "process_resident_memory_bytes")
        with ThreadPoolExecutor(agents) as threads:
            at_once = list(threads.map(lambda number: talk(url, number, options, turns), range(agents)))
        grown = metric(url, "process_resident_memory_bytes") - before
        assert metric(url, 'tier_bytes{tier="hot"}') <= budget
        assert metric(url, "restored_blocks_total") > 0
        assert metric(url, "weight_cache_misses_total") == 0
        assert metric(url, "corrupt_blocks_total") == metric(url, "save_errors_total") == 0
    with process(path, home=home / "one") as url:
        assert [talk(url, number, options, turns) for number in range(agents)] == at_once
    return grown


@short_and_long("turns", 3, 5)
def test_tiny(tmp_path: Path, turns: int) -> None:
    path = tmp_path / "tiny.gguf"
    Tiny(context=2048).write(path)
    with everwarm.load(path, pack="off") as llm:
        block = llm.new_kv().pool.block_bytes
    blocks = 4 * 12 + 32 * 12 * 1000 // block  # of four agents, and what it takes to find those of all
    at_once_and_one_by_one(path, tmp_path, blocks * block, {"logit_bias": LETTERS}, 32, turns)


@pytest.mark.model
@pytest.mark.slow
@short_and_long("size", (12, 2, 20 << 20), (32, 5, 40 << 20))
def test_a_real_model_in_bounded_memory(smollm2_path: Path, tmp_path: Path, size: tuple[int, int, int]) -> None:
    """An agent has 6 blocks of 1.5 MB after 5 turns, 3 after 2: 32 of them would take 280 MiB, 12 of them 54 MiB."""
    agents, turns, budget = size
    grown = at_once_and_one_by_one(smollm2_path, tmp_path, budget, {}, agents, turns)
    assert grown <= budget + (100 << 20)  # activations of a prefill, a thread for each agent, the index

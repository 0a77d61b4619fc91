"""Two processes, each with an engine and a hot tier of its own, on one prefix of S3: each resumes what the other has
saved, and answers what it would have answered without any cache.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import everwarm
from kv.s3 import Server
from tiny import Tiny

WORKER = """
import json, sys
import everwarm
path, url = sys.argv[1:]
with everwarm.load(path, warm="on", warm_url=url, restore="always", threads=1) as llm:
    for line in sys.stdin:
        asked = json.loads(line)
        done = llm.generate(**asked)
        receipt = done.receipt
        said = [done.tokens, done.text, receipt.tier, receipt.cached_tokens, receipt.committed, receipt.error]
        print(json.dumps(said))
        sys.stdout.flush()
"""
OPTIONS = {"max_tokens": 12, "temperature": 0.8, "seed": 5, "ignore_eos": True}


class Worker:
    """A replica in a process of its own."""

    def __init__(self, process: Any) -> None:
        self._process = process

    def ask(self, prompt: str, agent: str) -> list[Any]:
        self._process.stdin.write(json.dumps({"prompt": prompt, "agent": agent, **OPTIONS}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the replica has ended"
        found: list[Any] = json.loads(line)
        return found

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def worker(model: Path, url: str) -> Iterator[Worker]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(model), url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield Worker(process)
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.mark.slow
def test_two_engines_resume_each_other_s_agents_exactly(s3: Server, tmp_path: Path, home: Path) -> None:
    model, url = tmp_path / "tiny.gguf", s3.new_bucket()
    Tiny(context=2048).write(model)
    with everwarm.load(model) as alone, ExitStack() as held:
        replicas = [held.enter_context(worker(model, url)) for _ in range(2)]
        prompts = {f"agent {number}": f"{number} " + "once upon a time " * 20 for number in range(3)}
        for turn in range(4):
            for number, (agent, prompt) in enumerate(prompts.items()):
                tokens, text, tier, cached, committed, error = replicas[(turn + number) % 2].ask(prompt, agent)
                cold = alone.generate(prompt, cache=False, **OPTIONS)
                assert (tokens, text) == (cold.tokens, cold.text)
                assert (committed, error) == (True, None)
                assert tier == ("warm" if turn else "cold")
                assert (cached > 300) == bool(turn)
                prompts[agent] = prompt + text + f" and {turn}"


@pytest.mark.slow
def test_an_agent_whose_replica_was_killed_goes_on_elsewhere(s3: Server, tmp_path: Path, home: Path) -> None:
    model, url = tmp_path / "tiny.gguf", s3.new_bucket()
    Tiny(context=2048).write(model)
    prompt = "once upon a time " * 20
    with everwarm.load(model) as alone, ExitStack() as held:
        one = held.enter_context(worker(model, url))
        _, text, *_ = one.ask(prompt, "alice")
        one.kill()
        other = held.enter_context(worker(model, url))
        longer = prompt + text + " and then"
        tokens, _, tier, cached, committed, _ = other.ask(longer, "alice")
        assert tokens == alone.generate(longer, cache=False, **OPTIONS).tokens
        assert (tier, committed) == ("warm", True)
        assert cached > 300

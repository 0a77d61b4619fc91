"""The same work by llama.cpp's own server: without drafts, and with each of its kinds of n-gram drafts."""

import json
import statistics
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from everwarm.bench.load.server import ServerProcess, llama_cpp
from everwarm.errors import ConfigError

KINDS: Mapping[str, tuple[str, ...]] = {
    "without drafts": (),
    "ngram-simple": ("--spec-type", "ngram-simple"),
    "ngram-simple, short": (
        "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "16",
    ),
    "ngram-map-k": ("--spec-type", "ngram-map-k"),
    "ngram-mod": ("--spec-type", "ngram-mod"),
    "ngram-cache": ("--spec-type", "ngram-cache"),
}  # fmt: skip
"""Flags of llama-server by the name of what they do. Defaults where nothing is said; `short` looks for shorter runs."""

TIMEOUT_S = 1800.0


@dataclass(slots=True)
class PeerResult:
    """Tokens per second of one workload and one kind of drafts, run by run."""

    workload: str
    kind: str
    runs: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    @property
    def tok_s(self) -> float:
        return statistics.median(self.runs)


class Peer:
    """One llama-server for each kind of drafts, all running."""

    def __init__(self, model: Path, context: int, threads: int, kinds: Sequence[str]) -> None:
        self._servers: dict[str, ServerProcess] = {}
        self._held = ExitStack()
        self.results: dict[tuple[str, str], PeerResult] = {}  # by workload and kind
        try:
            for kind in kinds:
                self._servers[kind] = self._held.enter_context(llama_cpp(model, 1, context, threads, *KINDS[kind]))
        except BaseException:
            self._held.close()
            raise

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def run(self, workload: str, prompt: Sequence[int], sampling: Mapping[str, Any], max_tokens: int) -> None:
        """Decode behind these tokens, by each kind of drafts. The first run of a workload is a short one more."""
        for kind, server in self._servers.items():
            if (workload, kind) not in self.results:
                self.results[workload, kind] = PeerResult(workload, kind)
                _complete(server, prompt, sampling, min(max_tokens, 48))
            told, result = _complete(server, prompt, sampling, max_tokens), self.results[workload, kind]
            result.runs.append(told["predicted_per_second"])
            result.drafted += told.get("draft_n", 0)
            result.accepted += told.get("draft_n_accepted", 0)


def _complete(server: ServerProcess, prompt: Sequence[int], sampling: Mapping[str, Any], most: int) -> dict[str, Any]:
    body = {"prompt": list(prompt), "n_predict": most, "cache_prompt": True, "temperature": 0.0} | dict(sampling)
    request = urllib.request.Request(  # noqa: S310
        f"{server.url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
            told: dict[str, Any] = json.loads(response.read())["timings"]
            return told
    except (urllib.error.URLError, OSError, LookupError, ValueError) as error:
        raise ConfigError(f"llama-server gave no timings: {error}") from None

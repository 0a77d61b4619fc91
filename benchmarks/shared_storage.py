"""Resume an agent on another replica: proves that a history that one process has saved in object storage is gone on
from in another one sooner than it could be computed again.

    python benchmarks/shared_storage.py MODEL.gguf [TOKENS] [ROUNDS]

An S3 server (moto) runs on loopback. In each round, process A hears a new history of TOKENS tokens and answers;
process B, which has nothing in memory and nothing on disk of it, gets the next turn; then it computes the same prompt
cold. The answers must be equal. Prints a table, then one JSON line.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

WORKER = """
import json, sys
import everwarm
path, url = sys.argv[1:]
with everwarm.load(path, warm="on", warm_url=url, restore="always") as llm:
    llm.generate("warm up", max_tokens=2, cache=False)
    print("ready", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        done = llm.generate(**asked)
        said = {"tokens": done.tokens, "ttft_s": done.ttft_s, "prompt": done.prompt_tokens}
        said |= {"cached": done.receipt.cached_tokens, "tier": done.receipt.tier, "error": done.receipt.error}
        said |= {"restore_s": done.receipt.restore_s, "bytes": done.receipt.restored_bytes}
        print(json.dumps(said), flush=True)
"""


class Replica:
    """A process with a home, and so a cache on disk, of its own."""

    def __init__(self, model: str, url: str, home: Path, secret: str) -> None:
        home.mkdir()
        users = Path(os.environ.get("EVERWARM_HOME", Path.home() / ".everwarm"))
        for shared in ("models", "packs"):
            if (users / shared).exists():
                (home / shared).symlink_to(users / shared)
        environment = {**os.environ, "EVERWARM_HOME": str(home), "EVERWARM_WARM_SECRET": secret}
        command = [sys.executable, "-c", WORKER, model, url]
        self._process: Any = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert self._process.stdout.readline() == "ready\n"

    def ask(self, **asked: Any) -> dict[str, Any]:
        self._process.stdin.write(json.dumps({"max_tokens": 8, "temperature": 0.0, **asked}) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def main() -> None:
    from kv.s3 import server

    model, tokens, rounds = sys.argv[1], int((sys.argv[2:] or ["4096"])[0]), int((sys.argv[3:] or ["3"])[0])
    resumed, cold, sizes = [], [], []
    with server() as running, tempfile.TemporaryDirectory() as folder:
        url = running.new_bucket()
        one, other = (Replica(model, url, Path(folder) / name, "a secret of this benchmark") for name in ("a", "b"))
        try:
            for number in range(rounds):
                prompt = [1 + (7 * number + 13 * at * at) % 1000 for at in range(tokens)]
                first = one.ask(tokens=prompt, agent=f"agent {number}")
                assert first["error"] is None, first["error"]
                longer = [*prompt, *first["tokens"], 5, 6, 7]
                warm = other.ask(tokens=longer, agent=f"agent {number}")
                again = other.ask(tokens=longer, cache=False)
                assert warm["tokens"] == again["tokens"], "another answer than without a cache"
                assert warm["cached"] >= tokens, warm
                resumed.append(warm["ttft_s"])
                cold.append(again["ttft_s"])
                sizes.append(warm["bytes"])
        finally:
            one.end()
            other.end()
    ratio = statistics.median(cold) / statistics.median(resumed)
    print(f"{tokens:,} tokens, {sizes[0] / 1e6:.0f} MB of KV, median of {rounds} rounds")
    print(f"  cold                          {1000 * statistics.median(cold):8.0f} ms to the first token")
    print(f"  resumed on another replica    {1000 * statistics.median(resumed):8.0f} ms   ({ratio:.1f} x faster)")
    print(json.dumps({"tokens": tokens, "cold_s": cold, "resumed_s": resumed, "kv_bytes": sizes, "ratio": ratio}))


if __name__ == "__main__":
    main()

"""Thousands of streams at once: as many run as the queue holds, the others are refused in words, nothing is left."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import httpx
import pytest
from running import LETTERS, process

from everwarm.server import descriptors
from short_and_long import short_and_long
from tiny import Tiny

QUEUE = 64


async def stream(host: str, port: int, number: int, together: asyncio.Barrier) -> str:
    """How it went: the status, and whether the stream was whole."""
    asked = {
        "messages": [{"role": "user", "content": f"Hello {number}"}], "stream": True, "max_tokens": 8,
        "logit_bias": LETTERS, "everwarm": {"agent": f"agent {number}"},
    }  # fmt: skip
    body = json.dumps(asked).encode()
    reader, writer = await asyncio.open_connection(host, port)
    try:
        await together.wait()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        answer = await asyncio.wait_for(reader.read(), 300)
    finally:
        writer.close()
    status = answer.split(maxsplit=2)[1].decode()
    if status == "200":
        return "200 whole" if b"data: [DONE]" in answer and b'"committed": true' in answer else "200 broken"
    head, _, said = answer.partition(b"\r\n\r\n")
    in_words = b"retry-after: 1" in head.lower() and json.loads(said)["error"]["type"] == "rate_limit_error"
    return status + (" in words" if in_words else " broken")


@pytest.mark.slow
@short_and_long("streams", 500, 2000)
def test_thousands_of_streams_at_once(tmp_path: Path, streams: int) -> None:
    if descriptors.raise_limit() < 4 * streams:
        pytest.skip(f"this needs {4 * streams} file descriptors (ulimit -n)")
    Tiny(context=512).write(tmp_path / "tiny.gguf")
    with process(tmp_path / "tiny.gguf", "--max-queue", str(QUEUE), home=tmp_path) as url:
        address = httpx.URL(url)

        async def all_of_them() -> Counter[str]:
            together = asyncio.Barrier(streams)
            asking = [stream(address.host, address.port or 80, number, together) for number in range(streams)]
            return Counter(await asyncio.gather(*asking))

        went = asyncio.run(all_of_them())
        assert set(went) <= {"200 whole", "429 in words"}, went
        assert sum(went.values()) == streams
        assert went["200 whole"] >= QUEUE
        assert went["429 in words"] > 0
        metrics = httpx.get(url + "/metrics").text
        assert "everwarm_requests_active 0.0" in metrics
        assert f"everwarm_commits_total {went['200 whole']}.0" in metrics
        hello = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        assert httpx.post(url + "/v1/chat/completions", json=hello, timeout=60).status_code == 200

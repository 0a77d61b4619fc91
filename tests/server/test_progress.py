"""What the log says while somebody waits."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from everwarm.generation.generation import Progress
from everwarm.server import progress
from everwarm.server.progress import ProgressLog


def test_a_long_prompt_is_followed(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    generation: Any = SimpleNamespace(progress=None)
    with caplog.at_level(logging.INFO, "everwarm.progress"):
        log = ProgressLog("0123456789abcdef", "/v1/messages", "an agent\nwith=tricks")
        assert log.due_s() == 10.0
        log.write(cast(Any, generation))  # too early
        for computed in (None, 2000, 3500, 3500):
            now[0] += 10.0
            assert log.due_s() == 0.0
            generation.progress = None if computed is None else Progress(8000, computed)
            log.write(generation)
    assert [record.getMessage() for record in caplog.records] == [
        "id=0123456789ab begins route=/v1/messages agent='an agent\\nwith=tricks'",
        "id=0123456789ab waits for its turn, or for memory",
        "id=0123456789ab prefill tokens=2000 of=8000",
        "id=0123456789ab prefill tokens=3500 of=8000 tok_s=150 left_s=30",
        "id=0123456789ab prefill tokens=3500 of=8000",
    ]

"""The walk of a request: layers call downwards only."""

import json
import subprocess
import sys
from pathlib import Path

from tiny import Tiny

SCRIPT = Path(__file__).parent.parent / "scripts" / "walk.py"


def test_no_file_is_entered_again(tmp_path: Path) -> None:
    Tiny(context=512).write(tmp_path / "tiny.gguf")
    run = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "tiny.gguf", "--json"], capture_output=True, text=True, check=True
    )
    found = json.loads(run.stdout)
    entered = set(found["entered"])
    assert {"server/response.py", "llm.py", "generation/output.py", "engine/engine.py", "kv/turn.py"} <= entered
    assert found["circles"] == []
    # About 35; which thread is the first to enter a file differs from run to run.
    assert len(found["passed"]) <= 37

"""Waiting for something that another thread does: as long as it takes on a busy machine, and not longer."""

import time
from collections.abc import Callable

PATIENCE_S = 120.0


def wait_until(condition: Callable[[], object], pause_s: float = 0.005) -> None:
    """Fails only if it never becomes true. Pause for longer where it costs something to look."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"still not so after {PATIENCE_S:g} s"
        time.sleep(pause_s)

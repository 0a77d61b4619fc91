"""Waiting for something that another thread does: as long as it takes on a busy machine, and not longer."""

import time
from collections.abc import Callable

PATIENCE_S = 120.0


def wait_until(condition: Callable[[], object]) -> None:
    """Fails only if it never becomes true."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"still not so after {PATIENCE_S:g} s"
        time.sleep(0.005)

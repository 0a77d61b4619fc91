"""Replicas that are killed and frozen: the short form of `replica_torture.py`."""

from pathlib import Path

import pytest

from kv.replica_torture import torture
from kv.s3 import Server


@pytest.mark.slow
def test_no_acknowledged_turn_is_lost_when_replicas_are_killed_or_frozen(s3: Server, tmp_path: Path) -> None:
    counts = torture(s3.new_bucket(), tmp_path, 25, seed=1)
    assert counts["killed"] > 2
    assert counts["frozen"] > 0
    assert counts["warm"] > 5


@pytest.mark.soak
def test_the_same_for_long(s3: Server, tmp_path: Path) -> None:
    counts = torture(s3.new_bucket(), tmp_path, 700, seed=2)
    assert counts["killed"] >= 200

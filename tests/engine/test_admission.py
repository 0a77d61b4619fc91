"""Room in the KV budget."""

from dataclasses import dataclass

import pytest

from everwarm.engine.admission import Admission, Room
from everwarm.engine.budget import Budget
from everwarm.errors import CancelledError, CapacityError
from everwarm.waiting import Cancellation


@dataclass
class Index:
    """As much of an index as a budget reads."""

    most_bytes: int | None = 10

    def bytes_for(self, tokens: int) -> int:
        return -(-tokens // 16) + 1


def admission(index: Index, most_running: int = 64) -> Admission:
    return Admission(Budget(index, most_running))  # type: ignore[arg-type]


def test_a_request_asks_for_its_prompt_and_a_little_more() -> None:
    with admission(Index()).room(33, 0, Cancellation()) as room:
        assert room.size_bytes == 4


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(CapacityError, match="11 bytes of KV are needed for 160 tokens, the budget holds 10"):
        admission(Index()).room(160, 0, Cancellation()).__enter__()
    with admission(Index(most_bytes=None)).room(160_000, 0, Cancellation()):
        pass  # without a budget everything fits


def test_what_does_not_fit_now_waits_and_can_be_cancelled() -> None:
    inside = admission(Index())
    cancelled = Cancellation()
    cancelled.set()
    with inside.room(100, 0, Cancellation()):
        with pytest.raises(CancelledError, match="waiting for memory"):
            inside.room(100, 0, cancelled).__enter__()
        assert (inside.inside, inside.waiting) == (1, 0)
    assert inside.inside == 0


@pytest.mark.parametrize(
    ("held", "most_running", "fits"), [([], 64, True), ([5], 64, True), ([8], 64, False), ([1], 1, False)]
)
def test_what_fits_beside_others(held: list[int], most_running: int, fits: bool) -> None:
    budget = Budget(Index(), most_running)  # type: ignore[arg-type]
    rooms = [Room(None, 0, Cancellation(), blocks) for blocks in (*held, 3)]  # type: ignore[arg-type]
    assert budget.fits(rooms[:-1], rooms[-1]) is fits

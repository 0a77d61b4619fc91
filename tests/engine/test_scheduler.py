"""Which rows come next: a pure function of who is there and of how long rows took."""

from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

from everwarm.engine.drafts.proposal import NOTHING, Proposal
from everwarm.engine.scheduler import (
    FEW_ROWS,
    FIRST_ROWS,
    IDLE_S,
    LEAST_ALONE,
    LEAST_ROWS,
    MOST_ROWS,
    TILE_ROWS,
    Kind,
    Part,
    Scheduler,
)
from everwarm.engine.sequence import Sequence

_arrivals = count()


@dataclass
class Waiting:
    """What the scheduler looks at."""

    pending: int
    computed: int = 0
    priority: int = 0
    idle: bool = False
    arrival: int = field(default_factory=lambda: next(_arrivals))

    @property
    def in_one_step(self) -> int:
        return self.pending

    turn = SimpleNamespace(kv=SimpleNamespace(length=100))
    draft: Proposal = NOTHING

    def proposal(self, most: int) -> Proposal:
        return self.draft


def chosen(scheduler: Scheduler, *running: Waiting) -> list[tuple[Waiting, int]]:
    parts = scheduler.choose(cast(Any, running))
    return [(cast(Any, part.sequence), part.rows) for part in parts]


def learned(row_s: float) -> Scheduler:
    """A scheduler that knows how long a row takes."""
    scheduler = Scheduler()
    scheduler.took([Part(cast(Sequence, Waiting(100)), Kind.PREFILL, 100)], 100 * row_s)
    return scheduler


def test_a_step_of_prefill_alone_takes_a_quarter_of_a_second() -> None:
    for row_s, rows in ((1e-4, MOST_ROWS), (1e-3, 224), (5e-3, 48), (1e-2, LEAST_ALONE), (1.0, LEAST_ALONE)):
        one = Waiting(16_000)
        assert chosen(learned(row_s), one) == [(one, rows)]


def test_beside_someone_who_decodes_it_is_shorter() -> None:
    for row_s, rows in ((1e-4, MOST_ROWS), (1e-3, 112), (1e-2, LEAST_ROWS)):
        talking, one = Waiting(1), Waiting(16_000)
        assert chosen(learned(row_s), talking, one) == [(talking, 1), (one, rows - 1)], "together, whole tiles"


def test_the_first_step_of_all_is_small() -> None:
    one = Waiting(16_000)
    assert chosen(Scheduler(), one) == [(one, FIRST_ROWS)]


def test_a_prompt_that_is_nearly_done_goes_first_and_the_long_one_goes_on() -> None:
    long, short = Waiting(16_000, computed=500), Waiting(9, computed=500)
    assert chosen(learned(1e-2), long, short) == [(short, 9), (long, LEAST_ROWS - 9)]
    assert chosen(learned(1e-3), long, short) == [(short, 9), (long, 112 - 9)]


def test_many_of_them_take_no_more_than_half_of_a_step() -> None:
    long = Waiting(16_000)
    short = [Waiting(FEW_ROWS) for _ in range(20)]
    rows = {id(one): rows for one, rows in chosen(learned(1e-4), long, *short)}
    assert sum(rows.get(id(one), 0) for one in short) == MOST_ROWS // 2
    assert rows[id(long)] == MOST_ROWS // 2


def test_alone_they_take_all_of_it() -> None:
    short = [Waiting(60) for _ in range(5)]
    assert sum(rows for _, rows in chosen(learned(1e-4), *short)) == 300


def test_whoever_has_had_least_comes_next_and_the_more_important_before() -> None:
    much, little, important = Waiting(1000, computed=900), Waiting(1000, computed=100), Waiting(1000, 2000, priority=1)
    assert chosen(learned(1e-3), much, little) == [(little, 224)]
    assert chosen(learned(1e-3), much, little, important) == [(important, 224)]


def test_what_is_idle_waits_while_anybody_else_is_there() -> None:
    idle, other = Waiting(1000, idle=True, priority=9), Waiting(1)
    assert chosen(learned(1e-3), idle, other) == [(other, 1)]
    assert chosen(learned(1e-3), other, idle, Waiting(100, idle=True)) == [(other, 1)]


def test_idle_steps_grow_and_shrink_with_the_time_they_take() -> None:
    scheduler, idle = learned(1e-3), Waiting(100_000, idle=True)
    seen = []
    for row_s in [1e-4] * 8 + [1e-2] * 9:
        ((one, rows),) = chosen(scheduler, idle)
        assert one is idle
        seen.append(rows)
        scheduler.took([Part(cast(Sequence, idle), Kind.PREFILL, rows)], rows * row_s)
    assert seen[:3] == [TILE_ROWS, 2 * TILE_ROWS, 4 * TILE_ROWS]
    assert max(seen) * 1e-4 <= IDLE_S
    assert seen[-1] * 1e-2 <= IDLE_S
    assert chosen(scheduler, Waiting(16_000))[0][1] == 224, "what others take was not learned from it"


def test_a_draft_is_computed_if_it_is_worth_its_time() -> None:
    sure, likely, unlikely = Proposal([5, 6], [1.0, 1.0], 2), Proposal([7, 8], [0.9, 0.8]), Proposal([9], [0.05])
    ones = [Waiting(1, draft=sure), Waiting(1, draft=likely), Waiting(1), Waiting(1, draft=unlikely), Waiting(90)]

    def drafts(scheduler: Scheduler) -> list[tuple[int, ...]]:
        return [part.draft for part in scheduler.choose(cast(Any, ones))]

    scheduler = Scheduler()
    assert drafts(scheduler) == [(5, 6), (), (), (), ()]  # nothing is known of times
    for rows, seconds in ((1, 0.0100), (4, 0.0103), (8, 0.0107)) * 20:
        batch = [Part(cast(Sequence, Waiting(1)), Kind.DECODE, 1, rows, (1,) * (rows - 1))]
        scheduler.took(batch, seconds)
    assert drafts(scheduler)[:3] == [(5, 6), (7, 8), ()]

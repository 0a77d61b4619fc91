"""How many rows a draft is worth: pure functions of chances and of how long steps took."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from everwarm.engine.drafts.acceptance import CLASS, LONGEST, SUPPORTS, Acceptance
from everwarm.engine.drafts.plan import LEAST_GAIN, lengths
from everwarm.engine.drafts.proposal import NOTHING, Proposal
from everwarm.engine.drafts.row_cost import MOST_ROWS, RowCost

DEPTH = 100


def cost(*measured: tuple[int, float], attention_s: float = 0.0) -> RowCost:
    """After many steps with these numbers of rows and seconds."""
    found = RowCost()
    for _ in range(40):
        for rows, seconds in measured:
            found.took(rows, rows * DEPTH, seconds + rows * attention_s, rows * attention_s)
    return found


def proposal(*each: float, sure: int = 0) -> Proposal:
    """With the chance of each token if those before it are right."""
    chances = [1.0] * sure
    chance = 1.0
    for one in each:
        chance *= one
        chances.append(chance)
    return Proposal(list(range(len(chances))), chances, sure)


CHEAP = cost(*((rows, 0.01 + 0.0001 * rows) for rows in range(1, 33)))
DEAR = cost(*((rows, 0.01 * rows) for rows in range(1, 33)))


def test_rows_that_cost_nothing_are_all_taken() -> None:
    assert lengths([(DEPTH, proposal(*[0.9] * 10))], 0, CHEAP) == [10]


def test_rows_that_cost_as_much_as_a_step_are_never_taken() -> None:
    assert lengths([(DEPTH, proposal(*[0.99] * 10))], 0, DEAR) == [0]


def test_what_is_certain_is_taken_whatever_it_costs() -> None:
    assert lengths([(DEPTH, proposal(0.5, 0.5, sure=3))], 0, DEAR) == [3]
    assert lengths([(DEPTH, proposal(0.5, 0.5, sure=3))], 0, RowCost()) == [3]


def test_before_anything_was_measured_nothing_is_drafted() -> None:
    assert lengths([(DEPTH, proposal(*[0.99] * 10))], 0, RowCost()) == [0]


def test_a_draft_ends_where_it_becomes_unlikely() -> None:
    half = cost(*((rows, 0.01 + 0.002 * (rows - 1)) for rows in range(1, 33)))
    assert lengths([(DEPTH, proposal(0.95, 0.95, 0.95, 0.01, 0.9))], 0, half) == [3]


def test_deep_attention_makes_rows_dearer() -> None:
    draft = proposal(*[0.8] * 8)
    shallow, deep = cost((1, 0.01), (4, 0.011), (8, 0.012)), cost((1, 0.01), (4, 0.011), (8, 0.012), attention_s=0.01)
    assert lengths([(DEPTH, draft)], 0, shallow)[0] > lengths([(DEPTH, draft)], 0, deep)[0]


def test_a_step_that_jumps_at_a_tile_is_filled_up_to_it() -> None:
    tiles = cost(*((rows, 0.01 * -(-rows // 8)) for rows in range(1, 33)))
    assert lengths([(DEPTH, proposal(*[0.7] * 20))], 0, tiles) == [7]


@given(
    drafts=st.lists(st.lists(st.floats(0.01, 1.0), max_size=12), min_size=1, max_size=8),
    each=st.floats(1e-5, 1e-2),
    other_rows=st.integers(0, 100),
)
def test_the_choice_is_the_best_of_all(drafts: list[list[float]], each: float, other_rows: int) -> None:
    """Against all numbers of rows, each with its best choice of tokens."""
    known = cost(*((rows, 0.005 + each * rows) for rows in (1, 2, 4, 8, 16, 32, 64)))
    proposals = [(DEPTH, proposal(*chances)) for chances in drafts]
    chosen = lengths(proposals, other_rows, known)
    assert all(0 <= count <= len(one.tokens) for (_, one), count in zip(proposals, chosen, strict=True))

    def rate(counts: list[int]) -> float:
        tokens = len(counts) + sum(sum(one.chances[:count]) for (_, one), count in zip(proposals, counts, strict=True))
        rows = len(counts) + sum(counts)
        return tokens / known.seconds(rows + other_rows, rows * DEPTH)

    none = [0] * len(proposals)
    assert chosen == none or rate(chosen) >= LEAST_GAIN * rate(none) * (1 - 1e-9)
    draw = Random(1)
    for _ in range(30):
        other = [draw.randint(0, len(one.tokens)) for _, one in proposals]
        if rate(other) > LEAST_GAIN * rate(none):
            assert rate(chosen) >= rate(other) * (1 - 1e-9)


def test_sequences_without_a_draft_take_part() -> None:
    assert lengths([(DEPTH, NOTHING), (DEPTH, proposal(0.9, 0.9)), (DEPTH, NOTHING)], 0, CHEAP) == [0, 2, 0]


def test_costs_are_learned_and_one_slow_step_changes_little() -> None:
    found = cost((1, 0.010), (4, 0.014))
    assert abs(found.seconds(1, 0) - 0.010) < 1e-4
    assert abs(found.seconds(4, 0) - 0.014) < 1e-4
    assert found.seconds(1, 0) < found.seconds(2, 0) < found.seconds(4, 0) < found.seconds(20, 0)
    assert found.seconds(2 * MOST_ROWS, 0) == 2 * found.seconds(MOST_ROWS, 0)
    before = found.seconds(4, 0)
    found.took(4, 0, 1.0, 0.0)
    for _ in range(10):
        found.took(1, 0, 0.010, 0.0)
    assert found.seconds(4, 0) < 1.2 * before


def test_a_machine_that_gets_slower_gets_slower_for_all_numbers_of_rows() -> None:
    found = cost((1, 0.010), (4, 0.014), (8, 0.020))
    for _ in range(50):
        found.took(1, 0, 0.030, 0.0)
    assert abs(found.seconds(1, 0) - 0.030) < 1e-4
    assert 1.0 < found.seconds(8, 0) / found.seconds(1, 0) < 2.2
    for _ in range(20):
        for rows, seconds in ((1, 0.010), (4, 0.014), (8, 0.020)):
            found.took(rows, 0, seconds, 0.0)
    assert abs(found.seconds(8, 0) / found.seconds(1, 0) - 2) < 0.05


def test_acceptance_is_learned_and_shared() -> None:
    everyone = Acceptance()
    one, kind = Acceptance(everyone), CLASS[5] + 1
    first = one.chance(kind)
    for _ in range(200):
        one.learn(kind, True)
    assert one.chance(kind) > 0.95 > first
    assert Acceptance(everyone).chance(kind) > 0.9
    for _ in range(40):
        one.learn(kind, False)
    assert one.chance(kind) < 0.4
    assert one.chance(CLASS[20]) == Acceptance(everyone).chance(CLASS[20])


def test_longer_matches_are_believed_more() -> None:
    fresh = Acceptance()
    for support in range(SUPPORTS):
        chances = [fresh.chance(CLASS[match] + support) for match in range(2, LONGEST + 1)]
        assert chances == sorted(chances)
        assert 0 < chances[0] < chances[-1] < 1

"""Stop strings across the borders of pieces."""

from hypothesis import given
from hypothesis import strategies as st

from everwarm.text.stop import StopMatcher


def run(pieces: list[str], stops: list[str]) -> tuple[str, str | None]:
    matcher, text = StopMatcher(stops), ""
    for piece in pieces:
        text += matcher.push(piece)
        if matcher.matched is not None:
            return text, matcher.matched
    return text + matcher.flush(), None


def test_a_stop_across_pieces_is_never_emitted() -> None:
    assert run(["Hel", "lo ST", "O", "P bye"], ["STOP"]) == ("Hello ", "STOP")


def test_a_false_start_comes_out_after_all() -> None:
    assert run(["ST", "ORY"], ["STOP"]) == ("STORY", None)
    assert run(["a ST"], ["STOP"]) == ("a ST", None)


def test_the_match_that_is_complete_first_wins_then_the_longest() -> None:
    assert run(["abcd"], ["cd", "b"]) == ("a", "b")
    assert run(["abcd"], ["abcd", "b"]) == ("a", "b")
    assert run(["abcd"], ["c", "bc"]) == ("a", "bc")


def test_text_that_can_not_be_a_stop_is_not_held_back() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("one\n") == "one"
    assert matcher.push("two") == "\ntwo"


def test_no_stops_and_empty_stops_pass_everything() -> None:
    assert run(["a", "b"], []) == ("ab", None)
    assert run(["a", "b"], [""]) == ("ab", None)


@given(st.lists(st.text("ab", max_size=4)), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_the_cut_does_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    matches = [(whole.find(stop) + len(stop), whole.find(stop), stop) for stop in stops if stop in whole]
    _, cut, matched = min(matches, default=(0, len(whole), None))
    assert run(pieces, stops) == (whole[:cut], matched)

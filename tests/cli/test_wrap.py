"""Words are not broken, whatever the pieces that they come in."""

import textwrap

from hypothesis import given
from hypothesis import strategies as st

from everwarm.cli.wrap import Wrapper


def wrapped(pieces: list[str], width: int) -> str:
    written: list[str] = []
    wrapper = Wrapper(written.append, width)
    for piece in pieces:
        wrapper.push(piece)
    wrapper.flush()
    return "".join(written)


STORY = "The lighthouse on Gull Rock had stood empty for eleven years when Mara moved in. She brought a chest."


def test_lines_are_those_of_textwrap() -> None:
    assert wrapped(list(STORY), 30) == "\n".join(textwrap.wrap(STORY, 30))


@given(st.lists(st.text("ab \n日本", max_size=9)), st.integers(8, 20))
def test_pieces_do_not_matter_and_nothing_is_lost(pieces: list[str], width: int) -> None:
    text = "".join(pieces)
    assert wrapped(pieces, width) == wrapped([text], width)
    assert "".join(wrapped(pieces, width).split()) == "".join(text.split())


def test_without_a_width_everything_is_printed_as_it_comes() -> None:
    assert wrapped(["a ", " b\n", "c" * 200], 0) == "a  b\n" + "c" * 200


def test_a_long_word_and_a_text_without_spaces_do_not_wait_for_their_end() -> None:
    written: list[str] = []
    wrapper = Wrapper(written.append, 40)
    wrapper.push("see https://example.org/a/very/long/path")
    assert "".join(written).startswith("see")
    assert len("".join(written)) > 20
    wrapper.flush()
    written.clear()
    wrapper.push("\n日本語の文章")
    assert "".join(written) == "\n日本語の文章"

"""What a client carries for us."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everwarm.server.seals import PREFIX, Seals

MINE, OTHERS = Seals(b"mine"), Seals(b"another tenant's")


@given(st.text())
def test_what_was_sealed_is_opened_by_the_same_tenant_alone(text: str) -> None:
    sealed = MINE.seal(text)
    assert (MINE.open(sealed), OTHERS.open(sealed)) == (text, None)
    assert sealed.isascii()


def test_any_change_is_noticed() -> None:
    sealed = MINE.seal("I think that it is a lighthouse.")
    for at in range(len(PREFIX), len(sealed)):
        for letter in "Aa0-":
            changed = sealed[:at] + letter + sealed[at + 1 :]
            assert changed == sealed or MINE.open(changed) in (None, "I think that it is a lighthouse.")


@pytest.mark.parametrize(
    "foreign", [None, 3, "", "gAAAAABo", "ew1.", "ew1.!!!", "ew1.AAAA", "ew1." + "A" * 100, ["ew1."]]
)
def test_what_others_have_made_is_nothing(foreign: object) -> None:
    assert MINE.open(foreign) is None

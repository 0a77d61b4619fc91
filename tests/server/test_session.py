"""Which conversation a request of Anthropic's API belongs to."""

import pytest

from everwarm.server.anthropic.session import session_of


@pytest.mark.parametrize(
    ("user_id", "group"),
    [
        (None, ""),
        ("", ""),
        ("ada", "ada"),
        ('{"device_id": "d", "account_uuid": "", "session_id": "0b5e-1"}', "0b5e-1"),
        ("user_5e884898_account__session_01234567-89ab-cdef-0123-456789abcdef", "01234567-89ab-cdef-0123-456789abcdef"),
        ('{"session_id": 3}', '{"session_id": 3}'),
        ("{not json", "{not json"),
        ("[" * 10_000, "[" * 256),
        ("{" * 10_000, "{" * 256),
    ],
)
def test_the_session_names_the_group(user_id: str | None, group: str) -> None:
    assert session_of(user_id) == group

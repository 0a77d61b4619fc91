"""The catalogue is data: exact, and helpful to those who mistype."""

import re

import pytest

from everwarm.catalogue import CATALOGUE, find
from everwarm.errors import PullError
from everwarm.model.architectures import ARCHITECTURES


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=str)
def test_entries_are_exact(entry):
    assert CATALOGUE[entry.name] is entry
    assert re.fullmatch(r"[a-z0-9][a-z0-9.-]*", entry.name)
    assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
    assert entry.size_bytes > 0
    assert entry.file.endswith(".gguf")
    assert "/" not in entry.file
    assert entry.parts
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", part.requirement) for part in entry.parts)
    assert entry.licence
    assert entry.family in ARCHITECTURES


def test_the_nearest_name_is_suggested():
    with pytest.raises(PullError, match=r"'smolm2' .*did you mean smollm2\?.*known: smollm2.*hf:ORG/REPO"):
        find("smolm2")


def test_a_name_like_no_other_gets_the_list():
    with pytest.raises(PullError, match="known: smollm2") as error:
        find("../../etc/passwd")
    assert "did you mean" not in str(error.value)

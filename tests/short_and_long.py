"""Tests of many rounds come in two forms: `make test` runs the short one, `make soak` the long one."""

from typing import Any

import pytest


def short_and_long(name: str, short: Any, long: Any) -> pytest.MarkDecorator:
    """Run a test with `short` as its argument `name`; and with `long`, if it is asked for (`-m soak`)."""
    forms = [pytest.param(short, id="short"), pytest.param(long, id="long", marks=pytest.mark.soak)]
    return pytest.mark.parametrize(name, forms)

"""The filters and functions of the sandbox: Jinja's, behind bounds, and those that transformers adds.

Left out are filters that can't be bounded, that are random, or that make HTML.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import jinja2
from jinja2 import filters, nodes, tests
from jinja2.sandbox import safe_range
from jinja2.utils import Namespace

from everwarm.text.template.meter import (
    Refused,
    fit_format,
    fit_join,
    fit_number,
    fit_replace,
    fit_search,
    meter,
)

_LEFT_OUT = {
    "center",
    "filesizeformat",
    "forceescape",
    "pprint",
    "random",
    "striptags",
    "urlize",
    "wordwrap",
    "xmlattr",
}


def metered(function: Callable[..., Any]) -> Callable[..., Any]:
    """Count a filter or test, and what it makes, each time it is used: `map('replace', ...)` uses it for every item."""

    @wraps(function)  # keeps Jinja's notes on whether it wants the context
    def counted(*args: Any, **kwargs: Any) -> Any:
        meter().tick()
        return meter().chain(meter().account(function(*args, **kwargs)), *args, *kwargs.values())

    return counted


def tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as transformers writes it: nothing escaped for HTML, non-ASCII kept unless asked otherwise."""
    for size in (indent, *(separators or ())):
        fit_number(len(size) if isinstance(size, str) else size, 64, "tojson indent or separator")
    if indent is None:
        text = json.dumps(value, ensure_ascii=False, separators=separators, sort_keys=sort_keys)
    else:  # written in Python, so slow: look at the clock meanwhile
        encoder = json.JSONEncoder(ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        text = "".join(map(_ticked, encoder.iterencode(value)))
    # noncharacters stay: the marks on control tokens are among them
    return re.sub(r"[^\x00-\x7f\ufdd0-\ufdef]+", _escape, text) if ensure_ascii else text


def _ticked(text: str) -> str:
    meter().tick()
    return text


def _escape(found: re.Match[str]) -> str:
    return json.dumps(found[0])[1:-1]


def _batch(value: Iterable[Any], linecount: int, fill_with: Any = None) -> list[Any]:
    fit_number(linecount, 100_000, "batch")
    return list(filters.do_batch(value, linecount, fill_with))


def _slice(value: Any, slices: int, fill_with: Any = None) -> list[Any]:
    fit_number(slices, 100_000, "slice")
    return list(filters.sync_do_slice(value, slices, fill_with))


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    fit_format(str(value), "%", [args, kwargs])
    return filters.do_format(value, *args, **kwargs)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    meter().fit(len(s) + (s.count("\n") + 1) * (len(width) if isinstance(width, str) else width))
    return filters.do_indent(s, width, first, blank)


@jinja2.pass_eval_context
def _join(eval_ctx: nodes.EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = list(value)
    fit_join(str(d), items)
    return filters.sync_do_join(eval_ctx, items, d, attribute)


@jinja2.pass_eval_context
def _replace(eval_ctx: nodes.EvalContext, s: str, old: str, new: str, count: int | None = None) -> str:
    fit_replace(str(s), str(old), str(new))
    return filters.do_replace(eval_ctx, s, old, new, count)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    fit_number(precision, 1000, "round")
    return filters.do_round(value, precision, method)


def bounded_range(*args: int) -> range:
    """Jinja's: at most 100,000 items. Numbers beyond 2**61 share their hash, a million of them hang a dict."""
    for number in args:
        fit_number(number, 1 << 53, "range")
    return safe_range(*args)


@jinja2.pass_environment
def _sum(
    environment: jinja2.Environment, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0
) -> Any:
    """Jinja's, but a sum of lists counts what is copied for each of them."""
    if not isinstance(start, list | tuple):
        return filters.sync_do_sum(environment, iterable, attribute, start)
    values = iterable if attribute is None else map(filters.make_attrgetter(environment, attribute), iterable)
    total: Any = start
    for value in values:
        meter().fit(16 * len(total))
        meter().tick(16 * len(total))
        total = total + value
    return total


def _trim(value: str, chars: str | None = None) -> str:
    fit_search(str(value), chars)
    return filters.do_trim(value, chars)


TESTS: dict[str, Any] = {**tests.TESTS}

FILTERS: dict[str, Callable[..., Any]] = {
    **{name: function for name, function in filters.FILTERS.items() if name not in _LEFT_OUT},
    "batch": _batch,
    "slice": _slice,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "sum": _sum,
    "trim": _trim,
    "tojson": tojson,
}


class TemplateNamespace(Namespace):
    """Jinja's, without underscored names, and without a repr that shows what it holds: they can hold each other."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that namespace(self=1) works, as in Jinja
        """Same arguments as dict."""
        for name in dict(*args[1:], **kwargs):
            _check_public(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        """Do what `set ns.name = value` asks for."""
        _check_public(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        """Say nothing about the contents."""
        return "<Namespace>"


def _check_public(name: str) -> None:
    if name.startswith("_"):
        raise Refused(f"namespace attribute {name!r}: no names with a leading underscore")

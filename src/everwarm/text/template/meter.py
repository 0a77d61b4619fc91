"""What one rendering of an untrusted template may cost.

In: every operation of the template, announced before it makes something. Out: nothing, or Refused. Invariant: at any
moment all values made so far fit in `volume` characters, each of them in `value`, and all that was written in `output`.
Whoever calls `tick` often enough sees the deadline; no operation between two looks at the clock takes longer than a
second.
"""

import re
from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic, thread_time
from types import GeneratorType
from typing import Any
from weakref import WeakKeyDictionary

NUMBER_BITS = 1 << 16
DEPTH = 200
"""Nesting of values. What clients send is nested 64 deep at most. Python hashes and frees some values recursively, on a
stack that overflows if they are nested 100,000 deep.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Processor time, and sizes in characters. They grow with the input: a long conversation is no attack."""

    seconds: float = 5.0
    seconds_per_input: float = 5e-6
    value: int = 4 << 20
    value_per_input: int = 16
    volume: int = 64 << 20
    volume_per_input: int = 1024
    output: int = 16 << 20
    output_per_input: int = 64


class Refused(Exception):  # noqa: N818 - a reason, that becomes a TemplateError
    """The template asked for more than its limits."""


class Meter:
    """What one rendering has used so far."""

    def __init__(self, limits: Limits, input_size: int) -> None:
        """Start the clock."""
        self._seconds = limits.seconds + limits.seconds_per_input * input_size
        self._started = thread_time()
        self._deadline = monotonic() + self._seconds
        self._value = limits.value + limits.value_per_input * input_size
        self._volume = limits.volume + limits.volume_per_input * input_size
        self._output = limits.output + limits.output_per_input * input_size
        self._chained: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # generators over generators: how many

    def tick(self, size: int = 0) -> None:
        """Count one operation that makes `size` characters."""
        self._volume -= size
        if self._volume < 0:
            raise Refused("it makes too much text")
        if monotonic() > self._deadline:
            self._check_time()

    def write(self, size: int) -> None:
        """Count text that goes to the output, or to that of a macro, and stays in memory until the end."""
        self._output -= size
        if self._output < 0:
            raise Refused("it writes too much text")

    def _check_time(self) -> None:
        """The wall clock is quick to read, but runs on while other threads have the processor."""
        left = self._seconds - (thread_time() - self._started)
        if left <= 0:
            raise Refused(f"it ran for more than {self._seconds:.3g} s")
        self._deadline = monotonic() + left

    def fit(self, size: int) -> None:
        """Refuse a value of `size` characters before it is made."""
        if size > self._value:
            raise Refused(f"it makes a value of more than {self._value:,} characters")

    def account(self, result: Any) -> Any:
        """Count a value that has been made, and pass it on."""
        if isinstance(result, str):
            self.fit(len(result))
            self.tick(len(result))
        elif isinstance(result, int):
            if result.bit_length() > NUMBER_BITS:
                raise Refused(f"a number of more than {NUMBER_BITS:,} bits")
        elif isinstance(result, list | tuple | dict):
            self.tick(self.expanded(result))
        return result

    def expanded(self, value: object) -> int:
        """About how many characters `value` takes written out. What is shared counts each time: `==` visits it so."""
        size = depth = 0
        level = [value]
        while level:
            deeper: list[object] = []
            for item in level:
                if isinstance(item, str):
                    size += len(item)
                elif isinstance(item, list | tuple | dict | KeysView | ValuesView | ItemsView):
                    size += 16 * len(item)
                    self.fit(size)
                    deeper.extend(item)
                    if isinstance(item, dict):
                        deeper.extend(item.values())
                else:
                    size += 16
                self.fit(size)
            level = deeper
            depth += 1
            if depth > DEPTH:
                raise Refused(f"it nests values more than {DEPTH} deep")
        return size

    def chain(self, made: Any, *sources: object) -> Any:
        """Count how many generators a new generator reads through, and pass it on."""
        if isinstance(made, GeneratorType):
            before = (self._chained.get(source, 0) for source in sources if isinstance(source, GeneratorType))
            length = max(before, default=0) + 1
            if length > DEPTH:
                raise Refused(f"it chains more than {DEPTH} filters")
            self._chained[made] = length
        return made


_current: ContextVar[Meter] = ContextVar("everwarm_template_meter")


@contextmanager
def running(meter: Meter) -> Iterator[None]:
    """What is done within is counted by this meter."""
    before = _current.set(meter)
    try:
        yield
    finally:
        _current.reset(before)


def meter() -> Meter:
    """The meter that runs in this thread.

    There is none while a template is compiled: Jinja's constant folding then fails with LookupError, which it takes for
    "not constant", so that all work is left to run time.
    """
    return _current.get()


def fit_product(left: Any, right: Any) -> None:
    """Bound `left * right`."""
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            meter().fit(meter().expanded(value) * times)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > NUMBER_BITS:
        raise Refused(f"a product of more than {NUMBER_BITS:,} bits")


def fit_power(left: Any, right: Any) -> None:
    """Bound `left ** right`."""
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > NUMBER_BITS:
        raise Refused(f"a power of more than {NUMBER_BITS:,} bits")


def fit_format(form: str, field: str, args: object) -> None:
    """Bound `form % args` or `form.format(args)`; widths from arguments can't be bounded and are refused."""
    if re.search(r"\d{5}", form) or re.search(r"%[^a-zA-Z%]*\*" if field == "%" else r"\{[^{}]*\{", form):
        raise Refused(f"format {form[:40]!r}: no widths of five digits or from arguments")
    meter().fit(len(form) + form.count(field) * (meter().expanded(args) + 10_000))


def fit_replace(text: str, old: str, new: str) -> None:
    """Bound `text.replace(old, new)`."""
    meter().fit(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def fit_join(separator: str, items: list[Any], growth: int = 1) -> None:
    """Bound `separator.join(items)`, where each item may grow before it is joined."""
    meter().fit(growth * meter().expanded(items) + len(separator) * len(items))


def fit_split(text: str, separator: Any) -> None:
    """Bound the list that `text.split(separator)` makes: each item takes some 64 bytes besides its characters."""
    if isinstance(separator, str) and separator:
        meter().fit(16 * text.count(separator))


def fit_search(text: str, wanted: Any) -> None:
    """Bound what takes time in the product of both lengths: searching from the right, stripping a set of characters."""
    if isinstance(wanted, str) and len(text) * len(wanted) > 1 << 28:
        raise Refused("search or strip with an argument that is too long")


def fit_number(value: Any, limit: int, what: str) -> None:
    """Bound an argument that is a count of something."""
    if isinstance(value, int) and abs(value) > limit:
        raise Refused(f"{what} {value}: more than {limit:,}")

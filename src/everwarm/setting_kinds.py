"""What a setting is, and the kinds of settings there are.

A setting is a field of a dataclass in `everwarm.settings`. A function of this file makes the field: it says how a value
is read, whoever gives it (flag, variable, config.toml, keyword), and what people are told about it. `settings_of` lists
the settings of such a dataclass.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, TypeVar

from everwarm.sizes import Share, Size, parse_size, show_size

PREFIX = "EVERWARM_"
_RULE = "everwarm.setting"

Given: TypeAlias = str | int | float | Share | Sequence[str] | None
"""A value as a caller may give it. None: not given."""

WholeNumber = TypeVar("WholeNumber", int, int | None)
SizeOrNone = TypeVar("SizeOrNone", Size, Size | None)


@dataclass(frozen=True, slots=True)
class OffFlag:
    """A flag without a value that switches a setting off: `--no-pack`."""

    name: str
    help: str


@dataclass(frozen=True, slots=True)
class Rule:
    """What a field says about its setting."""

    help: str
    parse: Callable[[object], object]  # raises ValueError; what it has returned, it returns again
    metavar: str  # what stands for the value in help texts
    show: Callable[[Any], str] = str  # a value as people write it
    choices: tuple[str, ...] = ()
    off_flag: OffFlag | None = None
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: `kv_type` in config.toml and as a keyword, flag `--kv-type`, variable `EVERWARM_KV_TYPE`."""

    name: str
    default: object
    rule: Rule

    @property
    def flag(self) -> str:
        return self.rule.off_flag.name if self.rule.off_flag else "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def sentence(self) -> str:
        """The help text of the flag."""
        if self.rule.off_flag:
            return self.rule.off_flag.help
        return f"{self.rule.help[0].upper()}{self.rule.help[1:]}."

    def show(self, value: object) -> str:
        """A value as people write it."""
        empty = value is None or (value == () and not self.default)
        return "not set" if empty else self.rule.show(value)


def settings_of(kind: type) -> dict[str, Setting]:
    """The settings of a dataclass by name, in their order."""
    return {one.name: Setting(one.name, one.default, one.metadata[_RULE]) for one in fields(kind)}


def choice(*names: str, help: str) -> str:  # noqa: A002
    """One of several names. The first is the default."""

    def parse(given: object) -> str:
        if given not in names:
            raise ValueError(f"expected {', '.join(names[:-1])} or {names[-1]}")
        return str(given)

    return field(default=names[0], metadata={_RULE: Rule(help, parse, f"[{'|'.join(names)}]", choices=names)})


def switch(*, default: bool, help: str, off_flag: OffFlag | None = None) -> bool:  # noqa: A002
    """On or off. With `off_flag`, that is the only flag; else the flag takes a value."""

    def parse(given: object) -> bool:
        if isinstance(given, bool):
            return given
        if given not in ("on", "off"):
            raise ValueError("expected on or off")
        return given == "on"

    def show(value: bool) -> str:
        return "on" if value else "off"

    rule = Rule(help, parse, "[on|off]", show, choices=("on", "off"), off_flag=off_flag)
    return field(default=default, metadata={_RULE: rule})


def whole_number(least: int, most: int, *, default: WholeNumber, help: str) -> WholeNumber:  # noqa: A002
    """A whole number in a range."""

    def parse(given: object) -> int:
        try:
            value = int(given) if isinstance(given, str | int) and not isinstance(given, bool) else least - 1
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise ValueError(f"expected a whole number between {least} and {most}")
        return value

    return field(default=default, metadata={_RULE: Rule(help, parse, "<int>")})


def number(least: float, most: float, *, help: str, above: bool = False) -> float | None:  # noqa: A002
    """A number in a range, not set by default. `above`: it must be more than `least`."""

    def parse(given: object) -> float:
        try:
            value = float(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else math.nan
        except (ValueError, OverflowError):
            value = math.nan
        if not (least < value if above else least <= value) or value > most:  # NaN is refused, too
            between = f"more than {least:g} and at most {most:g}" if above else f"between {least:g} and {most:g}"
            raise ValueError(f"expected a number {between}")
        return value

    return field(default=None, metadata={_RULE: Rule(help, parse, "<number>", "{:g}".format)})


def seconds(least: float, *, default: float, help: str) -> float:  # noqa: A002
    """A duration."""

    def parse(given: object) -> float:
        try:
            value = float(given) if isinstance(given, str | int | float) and not isinstance(given, bool) else least - 1
        except (ValueError, OverflowError):
            value = least - 1
        if not value >= least:  # NaN is refused, too
            raise ValueError(f"expected a number of seconds, at least {least:g}")
        return value

    return field(default=default, metadata={_RULE: Rule(help, parse, "<seconds>", "{:g}".format)})


def size(*, default: SizeOrNone, help: str) -> SizeOrNone:  # noqa: A002
    """Bytes, or a share of a whole."""
    return field(default=default, metadata={_RULE: Rule(help, parse_size, "<size>", show_size)})


def byte_count(*, default: int, help: str) -> int:  # noqa: A002
    """Bytes, at least one."""

    def parse(given: object) -> int:
        value = parse_size(given)
        if isinstance(value, Share) or value < 1:
            raise ValueError("expected a number of bytes such as 16MiB")
        return value

    return field(default=default, metadata={_RULE: Rule(help, parse, "<size>", show_size)})


def text(*, default: str, help: str) -> str:  # noqa: A002
    """Any text."""

    def parse(given: object) -> str:
        if not isinstance(given, str):
            raise ValueError("expected a text")
        return given

    return field(default=default, metadata={_RULE: Rule(help, parse, "<str>")})


def texts(*, help: str) -> tuple[str, ...]:  # noqa: A002
    """Several texts: a list, or one string in which spaces separate them. The flag may be given several times."""

    def parse(given: object) -> tuple[str, ...]:
        if isinstance(given, str):
            return tuple(given.split())
        if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
            raise ValueError("expected a list of texts")
        return tuple(given)

    return field(default=(), metadata={_RULE: Rule(help, parse, "<str>", " ".join, is_list=True)})


def some_of(*names: str, default: tuple[str, ...], help: str) -> tuple[str, ...]:  # noqa: A002
    """Some of several names, in the order given: a list, or one string in which spaces or commas separate them; "none"
    for none of them. The flag may be given several times.
    """

    def parse(given: object) -> tuple[str, ...]:
        listed = [given] if isinstance(given, str) else given
        if not isinstance(listed, list | tuple) or not all(isinstance(one, str) for one in listed):
            raise ValueError("expected a list of names")
        found = tuple(dict.fromkeys(name for one in listed for name in one.replace(",", " ").split()))
        if found == ("none",):
            return ()
        if (not found and given != ()) or not set(found) <= set(names):
            raise ValueError(f"expected none, or some of {', '.join(names)}")
        return found

    def show(value: tuple[str, ...]) -> str:
        return " ".join(value) or "none"

    rule = Rule(help, parse, "<names>", show, choices=("none", *names), is_list=True)
    return field(default=default, metadata={_RULE: rule})

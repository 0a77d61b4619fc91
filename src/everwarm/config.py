"""Settings: where each value comes from, in one place.

In: what the caller gave (flag or argument), the environment, `config.toml` in the home directory, a default: the
first that says something wins. Out: a value and its source. A value that can't be understood is an error, never a
silent default.
"""

import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from everwarm.errors import ConfigError

PREFIX = "EVERWARM_"

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b?|b|%)?\s*", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {unit + "i": 1024**power for power, unit in enumerate("kmgt", start=1)}


def home() -> Path:
    """Where models and caches live. It is asked for before any setting, so it can come from the environment only."""
    path = os.environ.get(PREFIX + "HOME") or "~/.everwarm"
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"variable {PREFIX}HOME: can't understand {path!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class Share:
    """A size relative to a whole that is known only later: `75%`."""

    fraction: float

    def __str__(self) -> str:
        return f"{100 * self.fraction:g}%"


def parse_size(text: str | int) -> int | Share:
    """`8GiB`, `512MB`, `1.5g`, `75%` or a plain number of bytes."""
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError("a size can't be negative")
        return text
    match = _SIZE.fullmatch(str(text))
    if match is None:
        raise ValueError("expected a size such as 8GiB, 512MB or 75%")
    number, unit = float(match[1]), (match[2] or "").lower()
    if unit == "%":
        if number > 100:
            raise ValueError("a share can't be more than 100%")
        return Share(number / 100)
    if number > 1e18:
        raise ValueError("that is more than any machine has")
    return int(number * _UNITS[unit if unit == "b" else unit.removesuffix("b")])


def _number(least: int, most: int) -> Callable[[str | int], int]:
    def parse(text: str | int) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise ValueError(f"expected a whole number between {least} and {most}")
        return value

    return parse


def _one_of(*names: str) -> Callable[[str | int], str]:
    def parse(text: str | int) -> str:
        if text not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return str(text)

    return parse


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that can be set: as flag `--kv-type`, as variable `EVERWARM_KV_TYPE`, as `kv_type` in config.toml."""

    name: str
    parse: Callable[[str | int], object]
    default: object
    help: str
    has_flag: bool = True
    choices: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def sentence(self) -> str:
        """The help text, as a flag shows it."""
        choices = f": {', '.join(self.choices)}" if self.choices else ""
        return f"{self.help[0].upper()}{self.help[1:]}{choices}."

    @property
    def flag(self) -> str:
        return "--no-pack" if self.name == "pack" else "--" + self.name.replace("_", "-")


def _choice(name: str, choices: tuple[str, ...], what: str) -> Setting:
    """The first is the default."""
    return Setting(name, _one_of(*choices), choices[0], what, choices=choices)


SETTINGS = {
    setting.name: setting
    for setting in (
        _choice("backend", ("auto", "native", "reference"), "which kernels compute"),
        _choice("isa", ("auto", "avx512", "avx2", "portable"), "instruction set of the native kernels"),
        _choice("pack", ("on", "off"), "keep packed weights on disk, so that the next start maps them"),
        _choice("verify", ("background", "eager"), "when the pack's checksums are read, after or before the start"),
        Setting("threads", _number(1, 1024), None, "threads to compute with (default: the cores this process may use)"),
        Setting(
            "weight_budget",
            parse_size,
            None,
            "bytes that weights may take in memory, such as 8GiB or 75% of the model; the rest is streamed from disk "
            "(default: all of it if that is at most 80% of the memory that is available, else what fits into 80%)",
        ),
        _choice(
            "weight_policy",
            ("value", "lru", "pinned-prefix"),
            "what is kept if not everything fits (most time saved per byte, latest used, first come)",
        ),
        Setting(
            "prefetch_ahead",
            _number(0, 64),
            None,
            "layers that are read ahead of the computation if not everything fits; more takes more memory (default: 1, "
            "which hides the disk behind the computation where it can be hidden; 0 for weights that are not read but "
            "built from the model file, which takes time away from the computation)",
        ),
        _choice("prefetch", ("on", "off"), "read layers ahead in the background"),
        Setting(
            "access_window",
            _number(1, 86400),
            60,
            "seconds over which uses of weights are counted: shorter follows a change sooner, longer is steadier",
        ),
        Setting(
            "kv_budget",
            parse_size,
            Share(0.25),
            "bytes that keys and values may take in memory, such as 8GiB or 25% of what is available",
        ),
        _choice("kv_type", ("f16", "q8", "q4"), "how native kernels store keys and values (f16: 16 bits an element)"),
        _choice("warm", ("on", "off"), "keep agents on disk, so that they survive a restart"),
        Setting(
            "warm_quota",
            parse_size,
            Share(0.2),
            "bytes that agents of all models may take on disk, such as 50GiB or 20% of what is free there without them",
        ),
        Setting("warm_age", _number(1, 36500), 30, "days after which an agent that was not used is forgotten"),
        _choice(
            "durability",
            ("turn", "async"),
            "when a turn counts as ended: when it is safe on disk, or at once, while it is being written",
        ),
        _choice(
            "restore",
            ("auto", "always"),
            "read KV from disk where that is faster than computing it, or always",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Value:
    """What a setting resolved to, and which source said so."""

    value: object
    source: str


def resolve(given: Mapping[str, str | int | None] | None = None) -> dict[str, Value]:
    """Every setting with its source. `given` holds flags or arguments; None there means that nothing was said."""
    given = given or {}
    file = _read_config_file(home() / "config.toml")
    return {name: _resolve_one(setting, given.get(name), file) for name, setting in SETTINGS.items()}


def _resolve_one(setting: Setting, given: str | int | None, file: Mapping[str, str | int]) -> Value:
    candidates = (
        (given, f"flag {setting.flag}" if setting.has_flag else f"argument {setting.name}"),
        (os.environ.get(setting.variable), f"variable {setting.variable}"),
        (file.get(setting.name), f"config.toml {setting.name}"),
    )
    for text, source in candidates:
        if text is None or text == "":
            continue
        try:
            return Value(setting.parse(text), source)
        except ValueError as error:
            raise ConfigError(f"{source}: can't understand {text!r}: {error}") from None
    return Value(setting.default, "default")


def _read_config_file(path: Path) -> dict[str, str | int]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: can't read it: {error}; mend or remove the file") from None
    for name, value in values.items():
        if name not in SETTINGS:
            raise ConfigError(f"{path}: unknown setting {name!r}; known are {', '.join(SETTINGS)}")
        if not isinstance(value, str | int) or isinstance(value, bool):
            raise ConfigError(f"{path}: {name} must be a string or a whole number, found {value!r}")
    return values


def cores() -> int:
    """Cores that this process may run on (a container's share, not the machine's)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

"""Where settings come from, and where files live.

In: what the caller gave (flags or keywords), the environment, and `config.toml` in the home directory. Out: the typed
settings, and the source of each. The first source that gives a value wins; without any, the default holds. A value
that can't be understood is an error, never a silent default.
"""

import inspect
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

from everwarm.errors import ConfigError
from everwarm.setting_kinds import PREFIX, Given, Setting, settings_of
from everwarm.settings import ServeSettings, Settings

S = TypeVar("S", bound=Settings)
Function = TypeVar("Function", bound=Callable[..., Any])


def home() -> Path:
    """Where models and caches live. It is needed to find config.toml, so it can come from the environment only."""
    path = os.environ.get(PREFIX + "HOME") or "~/.everwarm"
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"variable {PREFIX}HOME: can't understand {path!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class Resolved(Generic[S]):
    """Settings, and which source gave each of them."""

    settings: S
    sources: Mapping[str, str]


def resolve(kind: type[S], given: Mapping[str, Given] | None = None, *, given_as: str = "flag") -> Resolved[S]:
    """All settings of `kind`. `given` holds values of flags, or of keywords if `given_as` is "argument"."""
    known, given = settings_of(kind), given or {}
    if unknown := set(given) - set(known):
        raise TypeError(f"unknown settings: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    file = _read_config_file(home() / "config.toml")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, setting in known.items():
        candidates = (
            (f"{given_as} {setting.flag if given_as == 'flag' else name}", given.get(name)),
            (f"variable {setting.variable}", os.environ.get(setting.variable)),
            (f"config.toml {name}", file.get(name)),
        )
        values[name], sources[name] = _first_value(setting, candidates)
    return Resolved(kind(**values), sources)


def load_settings(given: Mapping[str, Given]) -> Settings:
    """The settings of a model that Python code loads with these keywords."""
    return resolve(Settings, given, given_as="argument").settings


def with_setting_names(function: Function) -> Function:
    """Let `help(function)` name every setting in the place of `**settings`."""
    parameters = list(inspect.signature(function).parameters.values())
    keywords = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=field.type | str | None)
        for field in fields(Settings)
    ]
    function.__signature__ = inspect.Signature([*parameters[:-1], *keywords])  # type: ignore[attr-defined]
    return function


def _first_value(setting: Setting, candidates: Iterable[tuple[str, object]]) -> tuple[object, str]:
    """The first value that was given, and its source. An empty text or list counts as not given."""
    for source, value in candidates:
        if value is None or value == "" or value == [] or value == ():
            continue
        try:
            return setting.rule.parse(value), source
        except ValueError as error:
            raise ConfigError(f"{source}: can't understand {value!r}: {error}") from None
    return setting.default, "default"


def _read_config_file(path: Path) -> dict[str, object]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: can't read it: {error}; mend or remove the file") from None
    known = settings_of(ServeSettings)
    for name in values:
        if name not in known:
            raise ConfigError(f"{path}: unknown setting {name!r}; known are {', '.join(known)}")
    return values


def cores() -> int:
    """Cores that this process may run on (a container's share, not the machine's)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

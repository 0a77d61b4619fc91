"""Options that several commands share, each written once.

The flags of settings are made from the fields in `everwarm.settings`: `@takes_settings(Settings)` adds them to a
command, which gets the typed settings as its parameter `settings`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer

from everwarm import config
from everwarm.setting_kinds import Given, Setting, settings_of
from everwarm.settings import ServeSettings, Settings

Model = Annotated[str, typer.Argument(help="Path or pulled name.")]
MaxTokens = Annotated[int, typer.Option(help="Stop after this many tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy; higher is more random.")]
TopK = Annotated[int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the most likely tokens that reach this probability.")]
MinP = Annotated[float, typer.Option(help="Keep tokens at least this likely relative to the best.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: tokens already seen get less likely.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the answer at this text; may be given several times.")]
Agent = Annotated[
    str | None,
    typer.Option(help="Whose turn it is: this agent's history is kept, and its KV is not computed again."),
]
Stats = Annotated[bool, typer.Option("--stats", help="Say what the weight cache did, and where the time went.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]

S = TypeVar("S", bound=Settings)


def flag_of(name: str) -> Any:
    """The flag of one setting, for commands that take only a few of them."""
    setting = settings_of(ServeSettings)[name]
    if setting.rule.off_flag:
        return typer.Option(setting.flag, help=setting.sentence)
    # Not typer's own default: a flag that was not given must not win over a variable.
    default = "" if setting.default in (None, ()) else f"  [default: {setting.show(setting.default)}]"
    return typer.Option(setting.flag, metavar=setting.rule.metavar, help=setting.sentence + default)


KvType = Annotated[str | None, flag_of("kv_type")]
KvBudget = Annotated[str | None, flag_of("kv_budget")]
Threads = Annotated[int | None, flag_of("threads")]
WarmQuota = Annotated[str | None, flag_of("warm_quota")]
WarmUrl = Annotated[str | None, flag_of("warm_url")]
WarmAge = Annotated[str | None, flag_of("warm_age")]


def takes_settings(kind: type[S]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace the command's parameter `settings`, a `kind`, by a flag for each of its settings. A parameter `sources`
    gets where each value came from.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        # The settings of this kind first, those it shares with other commands last.
        settings = sorted(settings_of(kind).values(), key=lambda setting: setting.name not in kind.__annotations__)
        flags = [_parameter(setting) for setting in settings]
        own = [p for p in inspect.signature(command).parameters.values() if p.name not in ("settings", "sources")]

        @functools.wraps(command)
        def with_flags(**given: Any) -> None:
            flag_values = {name: _value(setting, given.pop(name)) for name, setting in settings_of(kind).items()}
            found = config.resolve(kind, flag_values)
            if "sources" in inspect.signature(command).parameters:
                given["sources"] = found.sources
            command(**given, settings=found.settings)

        keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        with_flags.__signature__ = inspect.Signature([*keywords, *flags])  # type: ignore[attr-defined]
        with_flags.__annotations__ = {p.name: p.annotation for p in [*own, *flags]} | {"return": None}
        return with_flags

    return decorate


def _parameter(setting: Setting) -> inspect.Parameter:
    value: Any = list[str] | None if setting.rule.is_list else str | None
    default = None
    if setting.rule.off_flag:
        value, default = bool, False
    annotation = Annotated[value, flag_of(setting.name)]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _value(setting: Setting, given: Any) -> Given:
    """What a flag says about its setting. A flag without a value says "off" if it is there, else nothing."""
    if setting.rule.off_flag:
        return "off" if given else None
    value: Given = given
    return value

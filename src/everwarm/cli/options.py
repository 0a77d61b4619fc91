"""Options that several commands share, each written once.

Flags that say how a model is loaded are made from the settings in `everwarm.config`: `@loads_model` gives them to a
command, which gets them as one dictionary, `settings`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from everwarm.config import SETTINGS

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
KvType = Annotated[str | None, typer.Option(help="How keys and values are stored: f16, q8, q4.")]
Threads = Annotated[int | None, typer.Option(help="Threads to compute with.")]
Stats = Annotated[bool, typer.Option("--stats", help="Say what the weight cache did, and where the time went.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object.")]

LoadSettings = dict[str, Any]
"""What `@loads_model` gives to a command: values of flags by setting, None where nothing was said."""


def loads_model(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the command's parameter `settings` by a flag for every setting that has one."""
    flags = [setting for setting in SETTINGS.values() if setting.has_flag]
    extra = [
        inspect.Parameter("no_pack", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=_NoPack)
        if setting.name == "pack"
        else inspect.Parameter(
            setting.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[str | None, typer.Option(setting.flag, help=setting.sentence)],
        )
        for setting in flags
    ]
    own = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]

    @functools.wraps(command)
    def with_flags(**given: Any) -> None:
        settings: LoadSettings = {p.name: given.pop(p.name) for p in extra}
        settings["pack"] = "off" if settings.pop("no_pack", False) else None
        command(**given, settings=settings)

    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    with_flags.__signature__ = inspect.Signature([*keywords, *extra])  # type: ignore[attr-defined]
    with_flags.__annotations__ = {p.name: p.annotation for p in [*own, *extra]} | {"return": None}
    return with_flags


_NoPack = Annotated[bool, typer.Option("--no-pack", help="Keep packed weights in memory only, write no pack.")]

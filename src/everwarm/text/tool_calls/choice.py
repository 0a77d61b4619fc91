"""Which tools the model may, must or must not call."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What a client asks for. `required` and `names` need a grammar that forces a call; a parser alone can't."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()  # only these may be called; without any, all may
    parallel: bool = True  # False: the answer ends with its first call

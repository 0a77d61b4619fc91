"""Which parser reads which format."""

import secrets
import string
from collections.abc import Callable

from everwarm.text.tool_calls.apertus import Apertus
from everwarm.text.tool_calls.gemma import FunctionGemma, Gemma
from everwarm.text.tool_calls.harmony import Harmony
from everwarm.text.tool_calls.json_objects import Apriel, CommandR, GigaChat, Granite, Hermes
from everwarm.text.tool_calls.llama3 import Llama3
from everwarm.text.tool_calls.named_json import DeepSeek, Kimi, Mistral
from everwarm.text.tool_calls.pythonic import Lfm2, ToolCode
from everwarm.text.tool_calls.reader import CallReader, Tools
from everwarm.text.tool_calls.tagged import DeepSeekV32, Glm, MiniMax, Qwen3Coder, Seed

PARSERS: dict[str, type[CallReader]] = {
    "hermes": Hermes,
    "qwen3-coder": Qwen3Coder,
    "seed": Seed,
    "minimax": MiniMax,
    "glm": Glm,
    "llama3": Llama3,
    "mistral": Mistral,
    "mistral-json": Mistral,
    "harmony": Harmony,
    "deepseek-r1": DeepSeek,
    "deepseek-v3.1": DeepSeek,
    "deepseek-v3.2": DeepSeekV32,
    "kimi": Kimi,
    "granite": Granite,
    "apriel": Apriel,
    "apertus": Apertus,
    "command-r": CommandR,
    "gigachat": GigaChat,
    "gemma": Gemma,
    "function-gemma": FunctionGemma,
    "tool-code": ToolCode,
    "lfm2": Lfm2,
}
"""By the name of the format in `formats.FORMATS`."""

_CHARACTERS = string.ascii_letters + string.digits


def new_call_id() -> str:
    """The id of a call: random, so that no two calls of a history share one and nobody can guess one."""
    return "call_" + secrets.token_hex(12)


def short_call_id() -> str:
    """Mistral's templates take ids of exactly nine letters and digits."""
    return "".join(secrets.choice(_CHARACTERS) for _ in range(9))


def call_parser(
    name: str, tools: Tools, controls: frozenset[str] = frozenset(), new_id: Callable[[], str] | None = None
) -> CallReader:
    """A parser of one answer. `controls` are the control tokens of the vocabulary."""
    return PARSERS[name](name, tools, controls, new_id or id_maker(name))


def id_maker(name: str) -> Callable[[], str]:
    """What makes the ids of calls in a format."""
    return short_call_id if name.startswith("mistral") else new_call_id

"""How requests are sampled that don't say so: as a setting of the server says, else as the model file recommends, else
as OpenAI's API does by default.
"""

from collections.abc import Mapping
from typing import Any

from everwarm.settings import ServeSettings

BUILT_IN: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": None,
}
"""Fields of `everwarm.engine.sampling.Sampling`."""

_OF_SETTINGS = {"temp": "temperature", "repeat_penalty": "repetition_penalty"}
"""Settings that have llama.cpp's name; the others are called as the fields are."""


def sampling_of(settings: ServeSettings) -> dict[str, Any]:
    """What the settings of a server say."""
    names = {_OF_SETTINGS.get(name, name): name for name in (*_OF_SETTINGS, *BUILT_IN) if hasattr(settings, name)}
    found = {field: getattr(settings, name) for field, name in names.items()}
    return {field: value for field, value in found.items() if value is not None}


def given(**fields: Any) -> dict[str, Any]:
    """Of the fields of a request, those that say something."""
    return {name: value for name, value in fields.items() if value is not None}

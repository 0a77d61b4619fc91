"""What is known of a model file without loading it: what it holds, what it takes in memory, how it talks.

In: an open GGUF file. Out: plain values, as `everwarm inspect --json` prints them and the page shows them.
"""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from everwarm.errors import EverwarmError

KV_TYPES = ("f16", "q8", "q4")


def model_use(file: Any, context: int | None) -> dict[str, Any]:
    """With an architecture that is not supported, only why. Memory is that of the native kernels, without the second
    copy of the model that is in the page cache anyway.
    """
    from everwarm import kernels
    from everwarm.kernels.backend import reach
    from everwarm.model.facts import KVSize, active_parameters, kv_size, read_model
    from everwarm.weights.memory import available_bytes
    from everwarm.weights.pack.source import FileSource

    try:
        config = read_model(file, context)
    except EverwarmError as error:
        return {"supported": False, "why_not": str(error)}
    tokens = min(context or config.context, config.context)
    backends = {kind: kernels.make(kernels.choose("native", "portable"), 1, 1, kind) for kind in KV_TYPES}
    kv: dict[str, KVSize] = {}
    for kind, backend in backends.items():
        try:
            kv[kind] = kv_size(config, backend)
        except EverwarmError:
            continue  # heads of a size that this type can't hold
    if not kv:
        return {"supported": False, "why_not": "the native kernels have no form for its keys and values"}
    weights = sum(FileSource(file, backends["f16"]).sizes.values())
    available = available_bytes()
    room = max(0, available - weights)
    return {
        "supported": True,
        "active_parameters": active_parameters(config, file.tensors),
        "context": config.context,
        "skipped_layers": config.skipped_layers,
        "weight_bytes": weights,
        "kv_bytes_per_token": {kind: size.per_token for kind, size in kv.items()},
        "window": {
            "tokens": reach(config.kv_shape),
            **{kind: size.window_per_token for kind, size in kv.items() if size.reach},
        },
        "state_bytes": next(iter(kv.values())).state,
        "memory": {"tokens": tokens, **{kind: weights + round(size.at(tokens)) for kind, size in kv.items()}},
        "fits": {"available_bytes": available, **{kind: size.fit_into(room) for kind, size in kv.items()}},
        **_talk(file),
    }


def _talk(file: Any) -> dict[str, Any]:
    """Which chat template and tool format the file has; None if there is none."""
    from everwarm.text.chat import ChatTemplate
    from everwarm.text.chat_format import ChatFormat
    from everwarm.text.tokenizer import Tokenizer

    try:
        control = Tokenizer.from_metadata(file.metadata).special_tokens
        template = ChatTemplate.from_metadata(file.metadata, special_tokens=control, bos="", eos="")
        chat = ChatFormat(template, frozenset(control))
        return {
            "chat": "ChatML" if "tokenizer.chat_template" not in file.metadata else "the file's template",
            "tool_format": chat.tool_format,
            "reasoning": None if chat.reasoning is None else chat.reasoning.begin.strip(),
        }
    except EverwarmError as error:
        return {"chat": None, "tool_format": None, "reasoning": None, "no_chat": str(error)}


def summarise(path: Path, file: Any) -> dict[str, Any]:
    from everwarm.engine.sampling import file_sampling

    infos = list(file.stored.values())
    return {
        "path": str(path),
        "version": file.version,
        "architecture": file.metadata.get("general.architecture"),
        "name": file.metadata.get("general.name"),
        "size_bytes": file.size_bytes,
        "parameters": sum(math.prod(info.shape) for info in infos),
        "tensor_count": len(infos),
        "tensor_types": dict(Counter(info.type.name for info in infos).most_common()),
        "sampling": file_sampling(file.metadata),
        "metadata": {key: _plain(value) for key, value in file.metadata.items()},
    }


def _plain(value: Any) -> Any:
    """A long array is told by its length and first items: a vocabulary is not for reading."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        shown = [_plain(item) for item in value[:8]]
        return shown if len(value) <= 8 else {"length": len(value), "first": shown}
    return value

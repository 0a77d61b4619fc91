"""What `everwarm inspect` says about using a model: whether it can be run, what it takes in memory, how it talks."""

from collections.abc import Iterator
from typing import Any

from everwarm.cli.console import human_bytes
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


def told_use(use: dict[str, Any]) -> Iterator[str]:
    """In words."""
    if not use["supported"]:
        yield f"can't be run: {use['why_not']}"
        return
    yield f"can be run: {use['active_parameters']:,} parameters for each token, context {use['context']:,}"
    if use["skipped_layers"]:
        yield f"{use['skipped_layers']} layers for drafts of further tokens (MTP) are in the file and are not used"
    each = ", ".join(f"{kind} {size:,.0f} bytes" for kind, size in use["kv_bytes_per_token"].items())
    yield f"KV per token: {each}"
    if window := use["window"]["tokens"]:
        each = ", ".join(f"{kind} {use['window'][kind]:,.0f} bytes" for kind in use["kv_bytes_per_token"])
        yield f"and for each of the last {window:,} tokens, in layers with a window: {each}"
    if use["state_bytes"]:
        yield f"state of a sequence, and of each place where it can be gone on from: {human_bytes(use['state_bytes'])}"
    memory = ", ".join(f"{human_bytes(use['memory'][kind])} ({kind})" for kind in use["kv_bytes_per_token"])
    yield f"memory for {use['memory']['tokens']:,} tokens, weights included: {memory}"
    room = ", ".join(f"{use['fits'][kind]:,} ({kind})" for kind in use["kv_bytes_per_token"])
    if any(use["fits"][kind] for kind in use["kv_bytes_per_token"]):
        free = human_bytes(use["fits"]["available_bytes"])
        yield f"fits: of {free} of free memory, what the weights leave holds tokens: {room}"
    else:
        needed, free = human_bytes(use["weight_bytes"]), human_bytes(use["fits"]["available_bytes"])
        yield f"does not fit: {needed} of weights, {free} of memory are free; give a --weight-budget to stream the rest"
    if use["chat"] is None:
        yield f"no chat: {use['no_chat']}"
    else:
        reasoning = f", reasoning in {use['reasoning']}" if use["reasoning"] else ""
        yield f"chat: {use['chat']}, tool calls as {use['tool_format']}{reasoning}"

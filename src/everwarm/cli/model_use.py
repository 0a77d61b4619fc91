"""What `everwarm inspect` says about using a model, in words."""

from collections.abc import Iterator
from typing import Any

from everwarm.cli.console import human_bytes


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

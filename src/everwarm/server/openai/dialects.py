"""Fields of llama.cpp's and vLLM's servers, and of OpenAI's older API, in the words of ours.

Clients that were written for those servers send them to any. What means something here is translated; what does not is
ignored and named in the response.
"""

from collections.abc import Callable
from typing import Any

Json = dict[str, Any]

RENAMED = {"n_predict": "max_tokens", "repeat_penalty": "repetition_penalty", "enable_thinking": "chat_template_kwargs"}
"""Other names, of llama.cpp and vLLM; they count where ours is not given."""

_UNLIMITED: dict[str, Callable[[Any], bool]] = {
    "max_tokens": lambda value: value == -1,
    "max_completion_tokens": lambda value: value == -1,
    "n_predict": lambda value: value in (-1, -2),
    "repeat_penalty": lambda value: value is None,
}
"""Values that mean "no limit" or "your default": as if they had not been given."""


def translated(body: Any) -> Any:
    """A body as our models read it. What is no object is left to them."""
    if not isinstance(body, dict):
        return body
    body = {name: value for name, value in body.items() if name not in _UNLIMITED or not _UNLIMITED[name](value)}
    if body.get("top_k") == -1:  # all of them
        body["top_k"] = 0
    for theirs, ours in RENAMED.items():
        if theirs in body:
            value = body.pop(theirs)
            body.setdefault(ours, {"enable_thinking": value} if theirs == "enable_thinking" else value)
    if isinstance(body.get("cache_prompt"), bool):
        extension = body.get("everwarm")
        if extension is None or (isinstance(extension, dict) and "cache" not in extension):
            body["everwarm"] = {**(extension or {}), "cache": body.pop("cache_prompt")}
    return _with_functions(body)


def _with_functions(body: Json) -> Json:
    """`functions` and `function_call`, as before there were tools."""
    functions = body.get("functions")
    if isinstance(functions, list) and "tools" not in body:
        body["tools"] = [{"type": "function", "function": function} for function in functions]
        del body["functions"]
    call = body.get("function_call")
    if call is not None and "tool_choice" not in body:
        body["tool_choice"] = {"type": "function", "function": call} if isinstance(call, dict) else call
        del body["function_call"]
    return body

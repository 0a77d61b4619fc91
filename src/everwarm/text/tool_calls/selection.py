"""Which format a model writes its calls in, as its chat template tells.

A template shows the model how calls are written, or writes those of earlier turns: the marks of its format are in its
source. Several formats share marks, so the order matters: the more particular come first.
"""

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>", "functions.")),
    ("deepseek-v3.2", ("｜DSML｜",)),
    ("deepseek-r1", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek-v3.1", ("<｜tool▁call▁begin｜>",)),
    ("kimi", ("<|tool_call_begin|>",)),
    ("minimax", ("<minimax:tool_call>",)),
    ("seed", ("<seed:tool_call>",)),
    ("seed", ("seed:tool_call",)),
    ("glm", ("<arg_key>",)),
    ("qwen3-coder", ("<function=", "<parameter=")),
    ("mistral", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral-json", ("[TOOL_CALLS]",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),
    ("gemma", ("<|tool_call>", "call:")),
    ("function-gemma", ("<start_function_call>",)),
    ("apertus", ("<|tools_prefix|>",)),
    ("command-r", ("<|START_ACTION|>",)),
    ("granite", ("<|tool_call|>",)),
    ("apriel", ("<tool_calls>",)),
    ("hermes", ("<tool_call>",)),
    ("gigachat", ("function call<|role_sep|>",)),
    ("gigachat", ("function call", "<|role_sep|>")),
    ("llama3", ("<|python_tag|>",)),
    ("llama3", ("<|start_header_id|>", '"parameters"')),
    ("tool-code", ("tool_code",)),
)
"""Formats, each with texts that are all in the source of a template that uses it."""


def format_of(source: str) -> str | None:
    """The name of the format; None if the template tells of none."""
    return next((name for name, signs in _SIGNS if all(sign in source for sign in signs)), None)

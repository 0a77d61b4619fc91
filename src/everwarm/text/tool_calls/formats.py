"""How families of models write tool calls, as data. A grammar that forces a call can be derived from it.

One or more calls are written as

    calls_begin  (call_begin NAME after_name ARGUMENTS call_end)  separator  (...)  calls_end

where ARGUMENTS is one JSON object (`Arguments.JSON`), or a notation of its own. White space inside these texts is what
the model was trained on; the parsers accept any.
"""

from dataclasses import dataclass
from enum import StrEnum


class Arguments(StrEnum):
    """How the arguments of a call are written."""

    JSON = "json"  # one JSON object
    TAGGED = "tagged"  # `Tags` around the name and the value of each argument
    PYTHON = "python"  # name=value, separated by commas; values are Python literals
    GEMMA = "gemma"  # {name:value,...}; texts stand between quote marks of their own


@dataclass(frozen=True, slots=True)
class Tags:
    """One argument: begin NAME after_name VALUE end. A text is written as it is, all other values as JSON."""

    begin: str
    after_name: str
    end: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls."""

    name: str
    call_begin: str
    after_name: str
    call_end: str = ""
    arguments: Arguments = Arguments.JSON
    tags: Tags | None = None  # with Arguments.TAGGED
    quote: str = '"'  # around texts, with Arguments.GEMMA
    calls_begin: str = ""
    separator: str = ""
    calls_end: str = ""


def _objects(name: str, begin: str, end: str = "", separator: str = "") -> ToolFormat:
    """JSON objects with a name and arguments."""
    call = ('{"name": "', '", "arguments": ', "}")
    return ToolFormat(name, *call, calls_begin=begin, separator=separator, calls_end=end)


FORMATS = {
    format_.name: format_
    for format_ in (
        ToolFormat("hermes", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n"),
        ToolFormat(
            "qwen3-coder", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", Arguments.TAGGED,
            Tags("<parameter=", ">\n", "\n</parameter>\n"), separator="\n",
        ),
        ToolFormat(
            "seed", "<seed:tool_call>\n<function=", ">\n", "</function>\n</seed:tool_call>", Arguments.TAGGED,
            Tags("<parameter=", ">", "</parameter>\n"), separator="\n",
        ),
        ToolFormat(
            "minimax", '<invoke name="', '">\n', "</invoke>\n", Arguments.TAGGED,
            Tags('<parameter name="', '">', "</parameter>\n"),
            calls_begin="<minimax:tool_call>\n", calls_end="</minimax:tool_call>",
        ),
        ToolFormat(
            "glm", "<tool_call>", "\n", "</tool_call>", Arguments.TAGGED,
            Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"), separator="\n",
        ),
        ToolFormat("llama3", '{"name": "', '", "parameters": ', "}", separator="; "),
        ToolFormat("mistral", "[TOOL_CALLS]", "[ARGS]"),
        _objects("mistral-json", "[TOOL_CALLS][", "]", ", "),
        ToolFormat(
            "harmony", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"
        ),
        ToolFormat(
            "deepseek-r1", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>",
            calls_begin="<｜tool▁calls▁begin｜>", separator="\n", calls_end="<｜tool▁calls▁end｜>",
        ),
        ToolFormat(
            "deepseek-v3.1", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
            calls_begin="<｜tool▁calls▁begin｜>", calls_end="<｜tool▁calls▁end｜>",
        ),
        ToolFormat(
            "deepseek-v3.2", '<｜DSML｜invoke name="', '">\n', "</｜DSML｜invoke>\n", Arguments.TAGGED,
            Tags('<｜DSML｜parameter name="', '" string="true">', "</｜DSML｜parameter>\n"),
            calls_begin="<｜DSML｜function_calls>\n", calls_end="</｜DSML｜function_calls>",
        ),
        ToolFormat(
            "kimi", "<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>",
            calls_begin="<|tool_calls_section_begin|>", calls_end="<|tool_calls_section_end|>",
        ),
        _objects("granite", "<|tool_call|>[", "]", ", "),
        _objects("apriel", "<tool_calls>[", "]</tool_calls>", ", "),
        ToolFormat(
            "apertus", '{"', '": ', "}",
            calls_begin="<|tools_prefix|>[", separator=", ", calls_end="]<|tools_suffix|>",
        ),
        ToolFormat(
            "command-r", '{"tool_call_id": "0", "tool_name": "', '", "parameters": ', "}",
            calls_begin="<|START_ACTION|>[", separator=", ", calls_end="]<|END_ACTION|>",
        ),
        _objects("gigachat", "function call<|role_sep|>\n"),
        ToolFormat(
            "gemma", "<|tool_call>call:", "", "<tool_call|>", Arguments.GEMMA, quote='<|"|>'
        ),
        ToolFormat(
            "function-gemma", "<start_function_call>call:", "", "<end_function_call>", Arguments.GEMMA,
            quote="<escape>",
        ),
        ToolFormat("tool-code", "", "(", ")", Arguments.PYTHON, calls_begin="```tool_code\n", calls_end="\n```"),
        ToolFormat(
            "lfm2", "", "(", ")", Arguments.PYTHON,
            calls_begin="<|tool_call_start|>[", separator=", ", calls_end="]<|tool_call_end|>",
        ),
    )
}  # fmt: skip
"""By name: what `--tool-parser` takes."""

"""Renders conversations through transformers, for chat templates in a directory, into chats.json.xz beside this file.

    python tests/golden/make_chats.py TEMPLATES [OUT --all]

needs transformers, and a directory of *.jinja files (llama.cpp has one: models/templates). Only templates of models
under a permissive licence are taken; --all takes every file, to look for mismatches by hand. Families whose templates
have another licence are there as templates of our own that do the same kind of things (`templates/` beside this file).

Where a template can't read a conversation as it stands, it is put into the next form: arguments of tool calls as
object or text, content as parts or text, content of a message that only calls tools as null or empty. What is
expected is the first form of which most comes out, without a trace of Python or JSON where text should be; if none
renders, the conversation must be refused.
"""

import copy
import itertools
import json
import lzma
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

PERMISSIVE = {
    "Apertus-8B-Instruct",
    "Bielik-11B-v3.0-Instruct",
    "ByteDance-Seed-OSS",
    "GLM-4.6",
    "GLM-4.7-Flash",
    "GigaChat3-10B-A1.8B",
    "HuggingFaceTB-SmolLM3-3B",
    "MiMo-VL",
    "MiniMax-M2",
    "Mistral-Small-3.2-24B-Instruct-2506",
    "Qwen-QwQ-32B",
    "Qwen-Qwen2.5-7B-Instruct",
    "Qwen-Qwen3-0.6B",
    "Qwen3-Coder",
    "Qwen3.5-4B",
    "StepFun3.5-Flash",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1",
    "deepseek-ai-DeepSeek-V3.2",
    "google-gemma-4-31B-it",
    "ibm-granite-granite-3.3-2B-Instruct",
    "ibm-granite-granite-4.0",
    "ibm-granite-granite-4.1",
    "llama-cpp-deepseek-r1",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
    "mistralai-Ministral-3-14B-Reasoning-2512",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "moonshotai-Kimi-K2",
    "openai-gpt-oss-120b",
    "unsloth-Apriel-1.5",
}

OURS = Path(__file__).with_name("templates")

NOW = datetime(2024, 2, 29, 13, 5)
BOS, EOS = "<|beginning|>", "<|ending|>"
CONTROL = r"<\|[^\s<>|{}]+\|>|<｜[^\s<>｜{}]+｜>|\[/?[A-Z_]+\]|</?(?:start|end)_of_turn>|<turn\|>|<\|turn>|</?s>"

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather at a place, <now> & later",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "description": "Unit"},
            },
            "required": ["city"],
        },
    },
}
SUM = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers",
        "parameters": {
            "type": "object",
            "properties": {"numbers": {"type": "array", "items": {"type": "number"}, "description": "What to add"}},
            "required": ["numbers"],
        },
    },
}


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    """One message."""
    return {"role": role, "content": content, **more}


def call(name: str, arguments: Any, number: int = 1) -> dict[str, Any]:
    """One tool call; nine characters of id, as Mistral's templates want it."""
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any, name: str = "get_weather", number: int = 1) -> dict[str, Any]:
    """What a tool returned."""
    return say("tool", content, tool_call_id=f"call0000{number}", name=name)


def part(text: str) -> dict[str, str]:
    """A part of typed content."""
    return {"type": "text", "text": text}


SYSTEM = say("system", "You are terse.")
ASK = say("user", "What is the weather in Zürich?")
CALLED = [ASK, say("assistant", None, tool_calls=[call("get_weather", {"city": "Zürich", "unit": "celsius"})])]
ANSWERED = [*CALLED, result('{"temperature": 7}'), say("assistant", "Seven degrees.")]

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "user": {"messages": [say("user", "Hello")]},
    "turns": {"messages": [SYSTEM, say("user", "Hi"), say("assistant", "Hello."), say("user", "Why?")]},
    "no prompt": {"messages": [SYSTEM, say("user", "Hi"), say("assistant", "Hello.")], "add_generation_prompt": False},
    "unicode": {
        "messages": [
            say("user", "  Grüße 👩‍🚀 <b>&amp;</b> \"'\\ \t {{ x }}\n\n"),
            say("assistant", "日本"),
            say("user", "é"),
        ]
    },
    "two users": {"messages": [say("user", "One"), say("user", "Two")]},
    "tools": {"messages": [SYSTEM, ASK], "tools": [WEATHER, SUM]},
    "tool turn": {"messages": [*ANSWERED, say("user", "Thanks")], "tools": [WEATHER]},
    "tool last": {"messages": [SYSTEM, *CALLED, result("7 °C")], "tools": [WEATHER]},
    "tool text": {
        "messages": [
            say("user", "Add"),
            say("assistant", "", tool_calls=[call("add", '{"numbers": [1, 2.5]}'), call("add", '{"numbers": []}', 2)]),
            result("3.5", "add"),
            result("0", "add", 2),
        ],
        "tools": [SUM],
    },
    "reasoning": {
        "messages": [say("user", "1+1?"), say("assistant", "2", reasoning_content="One and one."), say("user", "Sure?")]
    },
    "tags": {"messages": [say("user", "1+1?"), say("assistant", "<think>\nOne.\n</think>\n\n2"), say("user", "Sure?")]},
    "no thinking": {"messages": [say("user", "Hello")], "enable_thinking": False},
    "documents": {
        "messages": [say("user", "Who?")],
        "documents": [{"title": "A <b>", "text": "It was Ada."}],
    },
    "parts": {
        "messages": [say("user", [part("First"), part("Second")]), say("assistant", [part("Yes")]), say("user", "And?")]
    },
    "system parts": {"messages": [say("system", [part("Be brief.")]), say("user", [part("Hello")])]},
}


def forms(conversation: dict[str, Any]) -> list[dict[str, Any]]:
    """The conversation in every form a template might want, the likeliest first; equal ones once."""
    found: list[dict[str, Any]] = []
    for arguments, parts, null in itertools.product((as_object, json_text), PARTS, (None, "")):
        changed = copy.deepcopy(conversation)
        for message in changed["messages"]:
            for each in message.get("tool_calls", []):
                each["function"]["arguments"] = arguments(each["function"]["arguments"])
            if message["content"] is None:
                message["content"] = null
            message["content"] = parts(message["content"], message["role"])
        if changed not in found:
            found.append(changed)
    return found


def flat(content: Any, role: str) -> Any:
    """Content as text."""
    return "\n".join(each["text"] for each in content) if isinstance(content, list) else content


def split(content: Any, role: str) -> Any:
    """Content as parts."""
    return [part(content)] if isinstance(content, str) else content


PARTS = (
    lambda content, role: content,
    lambda content, role: content if role == "user" else flat(content, role),
    flat,
    lambda content, role: split(content, role) if role == "user" else flat(content, role),
    split,
)


def as_object(arguments: Any) -> Any:
    """Arguments as most templates want them."""
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def json_text(arguments: Any) -> Any:
    """Arguments as clients send them."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def expected(render: Any, template: str, conversation: dict[str, Any]) -> str | None:
    """The text of the form of which most comes out, or None where the template refuses every form."""
    best = None
    for form in forms(conversation):
        messages = form.pop("messages")
        form.setdefault("add_generation_prompt", True)
        try:
            [text], _ = render([messages], chat_template=template, bos_token=BOS, eos_token=EOS, **form)
        except Exception as error:  # whatever the template does
            print(f"    {type(error).__name__}: {str(error)[:100]}", file=sys.stderr)
            continue
        said = [line for message in messages for line in str(flat(message["content"], "") or "").splitlines()]
        faults = len(re.findall(r"""\{["']type["']: ?["']text|\{'numbers':|\{'city': 'Z""", text))
        faults += text.count("None") + sum(line.strip() not in text for line in said)
        if best is None or faults < best[0]:
            best = (faults, str(text))
    return best and best[1]


def main() -> None:
    """See above."""
    from transformers.utils import chat_template_utils

    class Frozen(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return NOW

    chat_template_utils.datetime = Frozen
    golden: dict[str, Any] = {
        "bos": BOS,
        "eos": EOS,
        "now": NOW.isoformat(),
        "conversations": CONVERSATIONS,
        "templates": {},
    }
    theirs = [
        path for path in sorted(Path(sys.argv[1]).glob("*.jinja")) if path.stem in PERMISSIVE or "--all" in sys.argv
    ]
    for path in [*theirs, *sorted(OURS.glob("*.jinja"))]:
        print(path.stem, file=sys.stderr)
        source = path.read_text("utf-8")
        texts = {
            name: expected(chat_template_utils.render_jinja_template, source, conversation)
            for name, conversation in CONVERSATIONS.items()
        }
        written = " ".join([source, *filter(None, texts.values())])
        control = sorted({BOS, EOS, *re.findall(CONTROL, written)})
        golden["templates"][path.stem] = {"source": source, "control": control, "texts": texts}
    out = Path(sys.argv[2]) if "--all" in sys.argv else Path(__file__).with_name("chats.json.xz")
    out.write_bytes(lzma.compress(json.dumps(golden, ensure_ascii=False).encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()

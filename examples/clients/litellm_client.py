"""litellm with a running server: an answer, a stream, a tool, structured output.

EVERWARM_URL=http://127.0.0.1:8080 python examples/clients/litellm_client.py
"""

import json
import os
from typing import Any

import litellm
from pydantic import BaseModel

URL = os.environ.get("EVERWARM_URL", "http://127.0.0.1:8080")
COMMON: dict[str, Any] = {"model": "openai/any", "api_base": f"{URL}/v1", "api_key": "everwarm", "temperature": 0}


class City(BaseModel):
    """A place."""

    name: str
    country: str


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


answer = litellm.completion(messages=said("What is the capital of France? One word."), max_tokens=20, **COMMON)
print("answer:", answer.choices[0].message.content)
chunks = list(litellm.completion(messages=said("Count to five in words."), stream=True, max_tokens=40, **COMMON))
print("stream:", len(chunks), "chunks")
answer = litellm.completion(
    messages=said("Oslo is the capital of Norway."), response_format=City, max_tokens=80, **COMMON
)
print("structured:", City.model_validate_json(answer.choices[0].message.content))
schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "weather", "description": "How it is.", "parameters": schema}}]
messages = said("How is the weather in Oslo? Use the tool, then answer in one sentence.")
answer = litellm.completion(messages=messages, tools=tools, tool_choice="required", max_tokens=100, **COMMON)
(call,) = answer.choices[0].message.tool_calls
messages += [answer.choices[0].message.model_dump()]
messages += [{"role": "tool", "tool_call_id": call.id, "content": "It snows, 3 degrees below zero."}]
answer = litellm.completion(messages=messages, tools=tools, tool_choice="none", max_tokens=60, **COMMON)
print("tool:", json.loads(call.function.arguments), answer.choices[0].message.content)

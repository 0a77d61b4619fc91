"""LangChain with a running server: an answer, a stream, a tool, structured output.

EVERWARM_URL=http://127.0.0.1:8080 python examples/clients/langchain_client.py
"""

import os

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

URL = os.environ.get("EVERWARM_URL", "http://127.0.0.1:8080")
chat = ChatOpenAI(model="any", base_url=f"{URL}/v1", api_key="everwarm", temperature=0, max_tokens=150)  # type: ignore[arg-type]


class City(BaseModel):
    """A place."""

    name: str
    country: str


@tool
def weather(city: str) -> str:
    """Tell how the weather is in a city."""
    return f"In {city} it snows, 3 degrees below zero."


print("answer:", chat.invoke("What is the capital of France? One word.").content)
print("stream:", len(list(chat.stream("Count from one to five in words."))), "pieces")
print("structured:", chat.with_structured_output(City).invoke("Oslo is the capital of Norway."))
asked = HumanMessage("How is the weather in Oslo? Use the tool, then answer in one sentence.")
called = chat.bind_tools([weather], tool_choice="weather").invoke([asked])
results = [ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]) for call in called.tool_calls]
answer = chat.bind_tools([weather], tool_choice="none").invoke([asked, called, *results])
print("tool:", called.tool_calls, answer.content)

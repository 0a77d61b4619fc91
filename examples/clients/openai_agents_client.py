"""OpenAI's agents SDK with a running server, over the Responses API: an answer, a stream, a tool, structured output.

EVERWARM_URL=http://127.0.0.1:8080 python examples/clients/openai_agents_client.py
"""

import asyncio
import os

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

URL = os.environ.get("EVERWARM_URL", "http://127.0.0.1:8080")
set_tracing_disabled(True)
model = OpenAIResponsesModel("any", AsyncOpenAI(base_url=f"{URL}/v1", api_key="everwarm"))


class City(BaseModel):
    """A place."""

    name: str
    country: str


calls: list[str] = []


@function_tool
def weather(city: str) -> str:
    """Tell how the weather is in a city."""
    calls.append(city)
    return "It snows, 3 degrees below zero."


async def main() -> None:
    short = ModelSettings(max_tokens=60, temperature=0)
    plain = Agent("plain", instructions="Answer briefly.", model=model, model_settings=short)
    print("answer:", (await Runner.run(plain, "What is the capital of France? One word.")).final_output)
    streamed = Runner.run_streamed(plain, "Count from one to five in words.")
    print("stream:", len([event async for event in streamed.stream_events()]), "events")
    structured = Agent("structured", model=model, output_type=City, model_settings=ModelSettings(max_tokens=100))
    print("structured:", (await Runner.run(structured, "Oslo is the capital of Norway.")).final_output)
    required = ModelSettings(max_tokens=150, temperature=0, tool_choice="required")
    tools = Agent(
        "tools", instructions="Answer in one sentence.", model=model, tools=[weather], model_settings=required
    )
    print("tool:", (await Runner.run(tools, "How is the weather in Oslo?", max_turns=4)).final_output, calls)


asyncio.run(main())

"""pydantic-ai with a running server: an answer, a stream, a tool, structured output.

EVERWARM_URL=http://127.0.0.1:8080 python examples/clients/pydantic_ai_client.py
"""

import asyncio
import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

URL = os.environ.get("EVERWARM_URL", "http://127.0.0.1:8080")
model = OpenAIChatModel("any", provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="everwarm"))


class City(BaseModel):
    """A place."""

    name: str
    country: str


calls: list[str] = []


def weather(city: str) -> str:
    """Tell how the weather is in a city."""
    calls.append(city)
    return "It snows, 3 degrees below zero."


async def main() -> None:
    plain = Agent(model, model_settings=ModelSettings(max_tokens=60, temperature=0))
    print("answer:", (await plain.run("What is the capital of France? One word.")).output)
    async with plain.run_stream("Count from one to five in words.") as stream:
        print("stream:", len([piece async for piece in stream.stream_text(delta=True)]), "pieces")
    structured = Agent(model, output_type=NativeOutput(City), model_settings=ModelSettings(max_tokens=100))
    print("structured:", (await structured.run("Oslo is the capital of Norway.")).output)
    tools = Agent(model, tools=[weather], model_settings=ModelSettings(max_tokens=150, temperature=0))
    try:
        found = await tools.run("How is the weather in Oslo?", usage_limits=UsageLimits(request_limit=3))
        print("tool:", calls, found.output)
    except UsageLimitExceeded as error:  # small models like to call again
        print("tool:", calls, error)


asyncio.run(main())

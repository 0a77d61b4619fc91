"""smolagents with a running server: an agent that calls a tool and answers.

EVERWARM_URL=http://127.0.0.1:8080 python examples/clients/smolagents_client.py
"""

import os

from smolagents import OpenAIModel, ToolCallingAgent, tool

URL = os.environ.get("EVERWARM_URL", "http://127.0.0.1:8080")
model = OpenAIModel("any", api_base=f"{URL}/v1", api_key="everwarm", temperature=0, max_tokens=200)


@tool
def weather(city: str) -> str:
    """Tell how the weather is in a city.

    Args:
        city: Its name.
    """
    return f"In {city} it snows, 3 degrees below zero."


agent = ToolCallingAgent(tools=[weather], model=model, max_steps=3)
print("tool:", agent.run("How is the weather in Oslo?"))

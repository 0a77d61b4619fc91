"""instructor with a running server: structured output, by a tool and by a schema.

EVERWARM_URL=http://127.0.0.1:8080 python examples/clients/instructor_client.py
"""

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel

URL = os.environ.get("EVERWARM_URL", "http://127.0.0.1:8080")


class City(BaseModel):
    """A place."""

    name: str
    country: str


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT):
    client = instructor.from_openai(OpenAI(base_url=f"{URL}/v1", api_key="everwarm"), mode=mode)
    found = client.chat.completions.create(
        model="any",
        response_model=City,
        messages=[{"role": "user", "content": "Oslo is the capital of Norway."}],
        max_tokens=100,
        temperature=0,
    )
    print(f"{mode.name.lower()}:", found)

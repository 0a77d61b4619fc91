"""Work as agents have it: conversations whose answer repeats a lot of what was said, some of it, or nothing.

What goes in is made here, the same each time for a workload and the number of an agent. What comes out is what a model
answers.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]

_NOUNS = ("order", "invoice", "ticket", "parcel", "account", "sensor", "reading", "booking", "voucher", "contract")
_FIELDS = ("status", "owner", "priority", "region", "amount", "due_date", "quantity", "category", "source", "weight")
_CITIES = ("Lisbon", "Oslo", "Graz", "Turin", "Porto", "Malmo", "Ghent", "Riga", "Split", "Bilbao")


@dataclass(frozen=True, slots=True)
class Task:
    """One conversation that a model is to answer."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)


def edit(number: int) -> Task:
    """Change one thing in a file, and write the whole file."""
    draw = random.Random(number)  # noqa: S311
    noun, (first, second) = draw.choice(_NOUNS), draw.sample(_FIELDS, 2)
    file = _python_file(noun, first, second)
    asked = (
        f"Here is {noun}s.py:\n\n```python\n{file}```\n\nRename the function `total_{first}` to `sum_of_{first}` "
        f"everywhere, and let `find` raise a LookupError instead of a KeyError. Answer with the whole file and nothing "
        "else."
    )
    return Task(({"role": "user", "content": asked},))


def extend_json(number: int) -> Task:
    """Add a field to every record of a list, and write the whole list."""
    draw = random.Random(number)  # noqa: S311
    noun = draw.choice(_NOUNS)
    records = [
        {
            "id": f"{noun}-{1000 + 37 * at}",
            "city": draw.choice(_CITIES),
            "amount": round(draw.uniform(5, 900), 2),
            "tags": draw.sample(_FIELDS, 2),
            "active": draw.random() < 0.5,
        }
        for at in range(12)
    ]
    asked = (
        f'These are our {noun}s:\n\n```json\n{json.dumps(records, indent=2)}\n```\n\nAdd a field "country" after '
        '"city" to every record, with the country of the city. Answer with the whole list as JSON and nothing else.'
    )
    return Task(({"role": "user", "content": asked},))


_WRITE = {
    "type": "function",
    "function": {
        "name": "write_file",
        "description": "Write a text file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
            "required": ["path", "content"],
        },
    },
}


def repeat_call(number: int) -> Task:
    """Call a tool again with arguments that differ a little."""
    draw = random.Random(number)  # noqa: S311
    one, other = draw.sample(_NOUNS, 2)
    port = draw.randrange(8000, 9000)
    call = {"path": f"deploy/{one}.yaml", "content": _deployment(one, port)}
    arguments = json.dumps(call)
    called = {"id": "call0001a", "type": "function", "function": {"name": "write_file", "arguments": arguments}}
    return Task(
        (
            {"role": "user", "content": f"Write deploy/{one}.yaml for the service {one} on port {port}, 2 replicas."},
            {"role": "assistant", "content": None, "tool_calls": [called]},
            {"role": "tool", "tool_call_id": "call0001a", "name": "write_file", "content": "written"},
            {"role": "user", "content": f"Now the same file for the service {other}, on port {port + 1}."},
        ),
        (_WRITE,),
    )


def summarise(number: int) -> Task:
    """Say in a few sentences what a text says."""
    return Task(({"role": "user", "content": f"Summarise this report in five sentences.\n\n{_report(number)}"},))


def prose(number: int) -> Task:
    """Write freely: nothing of it was said before."""
    subject = ("a lighthouse keeper", "a train at night", "the first snow", "an old violin", "two brothers")[number % 5]
    asked = f"Write a story about {subject}. Use rich and varied language."
    return Task(({"role": "user", "content": asked},), sampling={"temperature": 0.8, "top_p": 0.95, "seed": number})


WORKLOADS: Mapping[str, Callable[[int], Task]] = {
    "edit": edit,
    "json": extend_json,
    "tool": repeat_call,
    "summary": summarise,
    "prose": prose,
}
"""By name: what makes the task of an agent by its number."""


def _python_file(noun: str, first: str, second: str) -> str:
    kind = noun.capitalize()
    return f'''"""{kind}s: stored as JSON lines, one {noun} per line."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass
class {kind}:
    """One {noun} as it is stored."""

    name: str
    {first}: int = 0
    {second}: int = 0


def load(path: Path) -> list[{kind}]:
    """Read all {noun}s from a file. A file that does not exist holds none."""
    if not path.exists():
        return []
    with path.open() as file:
        return [{kind}(**json.loads(line)) for line in file if line.strip()]


def save(path: Path, {noun}s: list[{kind}]) -> None:
    """Write all {noun}s to a file, in their order."""
    with path.open("w") as file:
        for {noun} in {noun}s:
            file.write(json.dumps(asdict({noun})) + "\\n")


def find({noun}s: list[{kind}], name: str) -> {kind}:
    """The {noun} with this name."""
    for {noun} in {noun}s:
        if {noun}.name == name:
            return {noun}
    raise KeyError(name)


def total_{first}({noun}s: list[{kind}]) -> int:
    """The sum of {first} over all {noun}s."""
    return sum({noun}.{first} for {noun} in {noun}s)


def largest_{second}({noun}s: list[{kind}]) -> {kind} | None:
    """The {noun} with the largest {second}, if there is any."""
    return max({noun}s, key=lambda {noun}: {noun}.{second}, default=None)


def report(path: Path) -> str:
    """A few lines about the {noun}s in a file."""
    {noun}s = load(path)
    largest = largest_{second}({noun}s)
    lines = [
        f"{{len({noun}s)}} {noun}s",
        f"{first} in all: {{total_{first}({noun}s)}}",
        f"largest {second}: {{largest.name if largest else 'none'}}",
    ]
    return "\\n".join(lines)


if __name__ == "__main__":
    print(report(Path("{noun}s.jsonl")))
'''


def _deployment(name: str, port: int) -> str:
    return f"""apiVersion: apps/v1
kind: Deployment
metadata:
  name: {name}
  labels:
    app: {name}
spec:
  replicas: 2
  selector:
    matchLabels:
      app: {name}
  template:
    metadata:
      labels:
        app: {name}
    spec:
      containers:
        - name: {name}
          image: registry.example.com/{name}:latest
          ports:
            - containerPort: {port}
          env:
            - name: LOG_LEVEL
              value: info
            - name: PORT
              value: "{port}"
          readinessProbe:
            httpGet:
              path: /health
              port: {port}
"""


def _report(number: int) -> str:
    draw = random.Random(number)  # noqa: S311
    sentences = []
    for month in ("January", "February", "March", "April", "May", "June"):
        city, noun, other = draw.choice(_CITIES), draw.choice(_NOUNS), draw.choice(_NOUNS)
        kept, wanted = draw.choice(_FIELDS), draw.choice(_FIELDS)
        sentences.append(
            f"In {month} the office in {city} handled {draw.randrange(100, 900)} {noun}s, which was "
            f"{draw.choice(('more', 'fewer'))} than in the year before. {draw.choice(_CITIES)} took over the {other}s "
            f"after the storm had closed the road for {draw.randrange(2, 9)} days. Customers complained about the "
            f"{wanted} of a {noun} {draw.randrange(3, 40)} times, most often because the {other} was late. "
            f"The team added {draw.randrange(1, 6)} people and replaced the system that keeps the {kept}."
        )
    return "\n\n".join(sentences)

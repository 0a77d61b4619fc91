"""Finding words in what agents have heard and said."""

import time
from collections.abc import Iterator
from typing import Any

from everwarm.errors import StoreError
from everwarm.server.serving import Serving

MOST_SECONDS = 2.0
"""Histories are read from disk one by one, the latest used first, for so long at most."""
MOST_FOUND = 50
AROUND = 60
"""Characters that are shown before and after."""


def search(serving: Serving, tenant: str, wanted: str) -> dict[str, Any]:
    """Messages of a tenant's agents that contain a text, in any case of letters. On a thread."""
    store, until = serving.llm.agents, time.monotonic() + MOST_SECONDS
    agents, found, looked = store.listed(tenant), list[dict[str, Any]](), 0
    for agent in agents:
        if time.monotonic() > until or len(found) >= MOST_FOUND:
            break
        looked += 1
        try:
            history = store.peek(agent)
        except StoreError:
            continue
        for number, role, text in _texts(history.messages if history is not None else None):
            at = text.casefold().find(wanted.casefold())
            if at >= 0:
                begin = max(0, at - AROUND)
                found.append(
                    {
                        "agent": agent.name,
                        "message": number,
                        "role": role,
                        "before": text[begin:at],
                        "text": text[at : at + len(wanted)],
                        "after": text[at + len(wanted) : at + len(wanted) + AROUND],
                    }
                )
                break
    return {"found": found, "looked": looked, "agents": len(agents)}


def _texts(messages: Any) -> Iterator[tuple[int, str, str]]:
    for number, message in enumerate(messages or ()):
        if not isinstance(message, dict):
            continue
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
        if text := "\n".join(one for one in texts if isinstance(one, str)):
            yield number, str(message.get("role", "")), text

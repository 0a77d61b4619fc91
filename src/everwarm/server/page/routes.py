"""The routes that only the page uses. They may change with it, so they are not in the OpenAPI schema."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from everwarm.errors import StoreError
from everwarm.kv.agent import Agent
from everwarm.kv.strips import Prefix
from everwarm.server.errors import ApiError
from everwarm.server.keys import CALLER
from everwarm.server.page import static
from everwarm.server.page.live import Live, shows_machine
from everwarm.server.page.model import described, machine
from everwarm.server.page.search import search
from everwarm.server.request import Json, tenant_of
from everwarm.server.serving import Serving
from everwarm.settings import ServeSettings

T = TypeVar("T")

MOST_STRIPS = 64
MOST_IN_TREE = 300
"""Agents whose shared prefixes are drawn, the latest used."""
PREVIEW_TOKENS = 24


@dataclass(frozen=True, slots=True)
class PageOptions:
    """How the page is served: `on`, `read-only` (it offers nothing that changes anything) or `off`."""

    mode: str = "on"
    settings: ServeSettings | None = None  # to be shown
    sources: dict[str, str] = field(default_factory=dict)


class Names(BaseModel):
    """`POST /v1/page/blocks`."""

    model_config = ConfigDict(extra="forbid")
    names: Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=MOST_STRIPS)]


def file_response(path: str, request: Request) -> Response:
    """One of the page's files. Raises ApiError 404."""
    found = static.answer(path, request.headers)
    if found is None:
        raise ApiError(404, f"no such file of the page: {path[:100]!r}")
    return Response(found.body, found.status, found.headers)


def router(serving: Serving, live: Live, options: PageOptions) -> APIRouter:
    """The routes; none if the page is switched off."""
    api = APIRouter(include_in_schema=False)
    if options.mode == "off":
        return api
    threads = ThreadPoolExecutor(2, "everwarm-page")  # of their own: nothing else waits for a picture

    async def on_thread(act: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(threads, act)

    @api.get("/page/{name}")
    async def file(name: str, request: Request) -> Response:
        return file_response(static.PREFIX + name, request)

    @api.get("/v1/page/session")
    async def session(request: Request) -> Json:
        """Who asks, and what the page may offer."""
        caller = request.scope[CALLER]
        return {
            "model": serving.name,
            "tenant": None if serving.keys.is_open else caller.tenant,
            "read_only": options.mode == "read-only" or caller.reads_only,
            "machine": shows_machine(serving),
        }

    @api.get("/v1/page/live")
    async def watch(request: Request) -> Response:
        """Server-sent events: what happens now."""
        events = live.watch(tenant_of(request))
        first = await anext(events)

        async def parts() -> AsyncIterator[str]:
            try:
                yield first
                async for text in events:
                    yield text
            finally:
                await events.aclose()  # type: ignore[attr-defined]

        return StreamingResponse(parts(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    @api.post("/v1/page/blocks")
    async def blocks(asked: Names, request: Request) -> Json:
        """The blocks of some agents, and where they are. Agents that are gone are left out."""
        tenant = tenant_of(request)
        return await on_thread(lambda: {"agents": _strips(serving, tenant, asked.names)})

    @api.get("/v1/page/tree")
    async def tree(request: Request) -> Json:
        """What the tenant's histories have in common."""
        tenant = tenant_of(request)
        return await on_thread(lambda: _tree(serving, tenant))

    @api.get("/v1/page/search")
    async def find(request: Request, q: Annotated[str, Query(min_length=1, max_length=200)]) -> Json:
        """Messages that contain a text."""
        tenant = tenant_of(request)
        return await on_thread(lambda: search(serving, tenant, q))

    @api.get("/v1/page/model")
    async def model(request: Request) -> Json:
        """The model, and the machine if the tenant has it for itself."""
        url = f"{request.url.scheme}://{request.headers.get('host', '')}"

        def look() -> Json:
            said = described(serving, url)
            if shows_machine(serving):
                said["machine"] = machine(serving, options.settings, options.sources)
            return said

        return await on_thread(look)

    return api


def _strips(serving: Serving, tenant: str, names: list[str]) -> Json:
    store, found = serving.llm.agents, dict[str, Any]()
    for name in names:
        try:
            agent = store.find(name, tenant)
        except StoreError:
            continue
        strip, at = store.strip(agent), store.whereabouts(agent)
        found[name] = {
            "tier": at.tier,
            "cached_tokens": at.tokens,
            "hot_bytes": at.hot_bytes,
            "warm_bytes": at.warm_bytes,
            "block_tokens": strip.block_tokens,
            "runs": strip.runs,
            "states": strip.states,
        }
    return found


def _tree(serving: Serving, tenant: str) -> Json:
    store = serving.llm.agents
    agents: list[Agent] = store.listed(tenant)
    roots = store.shared_prefixes(agents[:MOST_IN_TREE])
    roots.sort(key=lambda root: -root.owners)
    return {
        "roots": [_branch(serving, root) for root in roots],
        "shown": min(len(agents), MOST_IN_TREE),
        "agents": len(agents),
    }


def _branch(serving: Serving, piece: Prefix) -> Json:
    """Recursion is bounded: each level has an agent's end or a fork, and there are few agents."""
    tokens = piece.first[: 4 * PREVIEW_TOKENS]
    ids = [int.from_bytes(tokens[at : at + 4], "big") for at in range(0, len(tokens), 4)]
    return {
        "begin": piece.begin,
        "end": piece.end,
        "owners": piece.owners,
        "blocks": piece.blocks,
        "hot": piece.hot,
        "warm": piece.warm,
        "text": " ".join(serving.llm.detokenize(ids).split())[:120],
        "agents": piece.agents,
        "children": [_branch(serving, child) for child in piece.children],
    }

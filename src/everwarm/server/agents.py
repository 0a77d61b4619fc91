"""Agents over HTTP: what there is, and what can be done with one. A tenant sees its own; others' are a 404.

Everything that touches files or waits for a turn runs on a thread. Names of agents are any text, percent-encoded in the
path.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, BinaryIO, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from everwarm.errors import CancelledError, StoreError
from everwarm.kv.agent import Agent, check_name
from everwarm.kv.manifest import Manifest
from everwarm.kv.store import AgentStore
from everwarm.kv.tools.export import export_agent
from everwarm.kv.tools.import_ import import_agent
from everwarm.server.errors import ApiError, as_api_error
from everwarm.server.redact import without_paths
from everwarm.server.request import Json, tenant_of
from everwarm.server.serving import Serving, stopping
from everwarm.server.transfers import FileResponse, Transfers
from everwarm.text.why import MOST_OTHERS, explain, may_be_compared

T = TypeVar("T")

MOST_LISTED = 10_000


class Fork(BaseModel):
    """`POST /v1/agents/{id}/fork`."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(min_length=1, max_length=256)]


class Pin(BaseModel):
    """`POST /v1/agents/{id}/pin`."""

    model_config = ConfigDict(extra="forbid")
    pinned: bool = True


def router(serving: Serving) -> APIRouter:
    """The routes. Those that end in a verb come before those that end in a name."""
    api = APIRouter(prefix="/v1/agents")
    agents = _Agents(serving)

    @api.get("")
    async def listed(
        request: Request,
        everything: Annotated[bool, Query(alias="all", description="Conversations without a name, too.")] = False,
        limit: Annotated[int, Query(ge=1, le=MOST_LISTED)] = 1000,
    ) -> Json:
        """The tenant's agents, the latest used first."""
        tenant = tenant_of(request)
        return await agents.on_thread(lambda: agents.listed(tenant, everything, limit))

    @api.post("/import", status_code=201)
    async def import_(
        request: Request,
        name: Annotated[str | None, Query(max_length=256, description="Another name than it had.")] = None,
    ) -> Json:
        """Take in an agent that was exported; the file is the body. No other agent uses its blocks."""
        tenant = tenant_of(request)
        if "trust" in request.query_params:  # whoever is believed can change the answers of all other agents
            raise ApiError(400, "trust: not possible over HTTP; import the file with `everwarm agents import --trust`")
        return await agents.import_(request, name, tenant)

    @api.post("/{name:path}/fork", status_code=201)
    async def fork(name: str, asked: Fork, request: Request) -> Json:
        """Another agent with the same history."""
        tenant = tenant_of(request)
        check_name(asked.name, "agent")
        await agents.change(name, tenant, lambda store: store.fork(name, asked.name, tenant))
        return await agents.described(asked.name, tenant)

    @api.post("/{name:path}/pin")
    async def pin(name: str, request: Request, asked: Pin | None = None) -> Json:
        """Keep its blocks where they are, or no longer."""
        tenant = tenant_of(request)
        pinned = asked is None or asked.pinned
        await agents.change(name, tenant, lambda store: store.pin(name, pinned, tenant))
        return await agents.described(name, tenant)

    @api.post("/{name:path}/warm")
    async def warm(name: str, request: Request) -> Json:
        """Bring its blocks into memory ahead of its next turn."""
        tenant = tenant_of(request)
        return await agents.on_thread(lambda: agents.warm(name, tenant))

    @api.post("/{name:path}/export", response_class=Response)
    async def export(name: str, request: Request) -> Response:
        """The agent as a file, for a server with the same model."""
        tenant = tenant_of(request)
        return await agents.export(name, tenant)

    @api.get("/{name:path}/why")
    async def why(name: str, request: Request) -> Json:
        """Why its last request reused no more: what changed in its prompt, and what would have helped."""
        tenant = tenant_of(request)
        found = await agents.on_thread(lambda: agents.why(name, tenant))
        return await agents.remembered(f"{name}/why", tenant) if found is None else found

    @api.get("/{name:path}")
    async def one(name: str, request: Request) -> Json:
        """One agent, and its conversation."""
        return await agents.remembered(name, tenant_of(request))

    @api.delete("/{name:path}")
    async def delete(name: str, request: Request, evict_only: bool = False) -> Json:
        """Remove it; or only drop it from memory, so that its next turn is warm."""
        tenant = tenant_of(request)
        if evict_only:
            freed = await agents.change(name, tenant, lambda store: store.evict(name, tenant))
            return await agents.described(name, tenant) | {"freed_bytes": freed}
        await agents.change(name, tenant, lambda store: store.delete(name, tenant))
        return {"id": name, "object": "agent.deleted", "deleted": True}

    return api


class _Agents:
    """What the routes do."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        # Of their own: what waits here for memory or a disk must not keep requests from starting.
        self._threads = ThreadPoolExecutor(16, "everwarm-agents")
        self._transfers = Transfers()

    async def on_thread(self, act: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, act)

    @property
    def _store(self) -> AgentStore:
        return self._serving.llm.agents

    def listed(self, tenant: str, everything: bool, limit: int) -> Json:
        found = [agent for agent in self._store.listed(tenant) if everything or not agent.anonymous]
        data = [self._json(agent) for agent in found[:limit]]
        return {"object": "list", "data": data, "has_more": len(found) > limit}

    async def described(self, name: str, tenant: str) -> Json:
        return await self.on_thread(lambda: self._json(self._find(name, tenant)))

    async def remembered(self, name: str, tenant: str) -> Json:
        """With what it has heard and said, if its turns came as messages."""

        def read() -> Json:
            agent = self._find(name, tenant)
            return self._json(agent) | {"messages": self._store.history(agent).messages}

        return await self.on_thread(read)

    def why(self, name: str, tenant: str) -> Json | None:
        """On a thread: other histories are read. None if it is the name of an agent that ends so."""
        store, active = self._store, self._serving.llm.settings.prompt_rules
        known = {agent.name for agent in store.listed(tenant)}
        if name not in known and f"{name}/why" in known:
            return None
        manifest = _clear(lambda: store.manifest(self._find(name, tenant)))

        def others() -> Iterator[Manifest]:
            near = [other for other in store.listed(tenant) if other.created <= manifest.created]
            for other in near[: MOST_OTHERS + 1]:
                with contextlib.suppress(StoreError):  # gone or damaged meanwhile
                    if may_be_compared(found := store.manifest(other), manifest):
                        yield found

        return {"object": "agent.why"} | explain(manifest, others(), active).as_json(active)

    async def change(self, name: str, tenant: str, act: Callable[[AgentStore], T]) -> T:
        """Do something that needs the agent's turn. As long as it talks no thread is kept waiting."""
        agent = await self.on_thread(lambda: self._find(name, tenant))
        try:
            async with asyncio.timeout(self._serving.limits.timeout_s):
                while agent.talks:
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise ApiError(409, f"agent {name!r} is busy; try again later") from None
        return await self.on_thread(lambda: _clear(lambda: act(self._store)))

    def warm(self, name: str, tenant: str) -> Json:
        llm, agent = self._serving.llm, self._find(name, tenant)
        try:
            with llm.admission.room(agent.kv_tokens, 0, self._serving.stopped):
                done = _clear(lambda: self._store.warm_up(name, tenant))
        except CancelledError:
            raise stopping() from None
        return self._json(agent) | {
            "tier": done.tier,
            "cached_tokens": done.cached_tokens,
            "restored_blocks": done.restored_blocks,
            "restored_bytes": done.restored_bytes,
            "restore_s": done.restore_s,
            "reason": without_paths(done.reason),
        }

    async def export(self, name: str, tenant: str) -> Response:
        def write() -> BinaryIO:
            """A file that has no name any more: it goes with whoever reads it."""
            self._find(name, tenant)
            with tempfile.TemporaryDirectory(prefix="everwarm-") as folder:
                path = Path(folder) / "agent"
                _clear(lambda: export_agent(self._store, name, path, tenant), path)
                return path.open("rb")

        with contextlib.ExitStack() as held:
            held.enter_context(self._transfers.sending())
            file = await self.on_thread(write)
            headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}.everwarm"}
            return FileResponse(file, headers, held.pop_all())

    async def import_(self, request: Request, name: str | None, tenant: str) -> Json:
        store = await self.on_thread(lambda: self._store)
        if name is not None:
            check_name(name, "agent")
        async with self._transfers.received(request, store.stats().warm_quota) as path:
            moved = await self.on_thread(lambda: _clear(lambda: import_agent(store, path, name, tenant), path))
        return await self.described(moved.agent, tenant)

    def _find(self, name: str, tenant: str) -> Agent:
        try:
            return self._store.find(name, tenant)
        except StoreError as error:
            raise ApiError(404, str(error)) from None

    def _json(self, agent: Agent) -> Json:
        at = self._store.whereabouts(agent)
        return {
            "id": agent.name,
            "object": "agent",
            "model": self._serving.name,
            "group": agent.group or None,
            "anonymous": agent.anonymous,
            "pinned": agent.pinned,
            "generation": agent.generation,
            "tokens": agent.tokens,
            "cached_tokens": at.tokens,
            "tier": at.tier,
            "hot_bytes": at.hot_bytes,
            "warm_bytes": at.warm_bytes,
            "saved": agent.unsaved is None,
            "talking": agent.talks,
            "created_at": agent.created,
            "last_used_at": agent.used,
        }


def _clear(act: Callable[[], T], path: Path | None = None) -> T:
    """What the store refuses, told without the names of our own files; `path` is the client's file."""
    try:
        return act()
    except StoreError as error:
        text = str(error).replace(f"{path}: ", "").replace(str(path), "the file") if path else str(error)
        raise ApiError(as_api_error(error).status, without_paths(text)) from None

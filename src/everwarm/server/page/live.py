"""Live data for pages: one collector for all of them, which looks at the server only while somebody watches.

A watcher first gets `hello`, with the last hour; then `tick` twice a second; `agents` with those that have changed; and
`weights` when layers have come or gone. A watcher that does not keep up is let go: it connects again and gets
everything anew. A tenant sees its own requests and agents; figures of the machine are told only where one tenant has it
for itself.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Any

from everwarm.kv.agent import Agent
from everwarm.server.errors import ApiError
from everwarm.server.log import Line
from everwarm.server.page.ended import KEPT_S, EndedRequests
from everwarm.server.page.sample import FIELDS, Sample, budgets, layers, take
from everwarm.server.serving import Answering, Serving

EVERY_S = 0.5
AGENTS_EVERY = 2
"""Ticks between two looks at all agents."""

KEEP_EVERY_S = 2.0
"""Of the samples, one in so many seconds is kept for an hour."""

MOST_WATCHERS = 64
MOST_BEHIND = 16
"""Events that a watcher may be behind."""

MOST_AGENTS = 5000
"""Agents of a tenant that are told of, the latest used."""

Row = tuple[Any, ...]
Event = tuple[str, Any]

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

AGENT_FIELDS = ("id", "tokens", "used", "created", "pinned", "talking", "anonymous", "saved", "group")


def agent_row(agent: Agent) -> Row:
    """What is told of each agent; its fields are `AGENT_FIELDS`."""
    return (
        agent.name, agent.tokens, round(agent.used, 1), round(agent.created, 1), agent.pinned, agent.talks,
        agent.anonymous, agent.unsaved is None, agent.group,
    )  # fmt: skip


def shows_machine(serving: Serving) -> bool:
    """Whether a tenant may see the figures of the whole machine: nobody else is on it."""
    return serving.keys.is_open or len(serving.keys.tenants) == 1


@dataclass(eq=False, slots=True)
class Watcher:
    """One page that is open."""

    tenant: str
    queue: asyncio.Queue[str | None] = field(default_factory=lambda: asyncio.Queue(MOST_BEHIND))

    def put(self, text: str | None) -> bool:
        """False if it does not keep up."""
        try:
            self.queue.put_nowait(text)
        except asyncio.QueueFull:
            return False
        return True


class Live:
    """The collector. All of it runs on the event loop; only samples are taken on a thread."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.ended = EndedRequests()
        self._samples: deque[Sample] = deque(maxlen=int(KEPT_S / KEEP_EVERY_S))
        self._watchers: set[Watcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._rows: dict[str, dict[str, Row]] = {}  # of the tenants that are watched: agents by name
        self._moved, self._blocks = 0, 0
        self._dirty = True  # agents may have changed
        self._layers: list[dict[str, Any]] = []

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def observe(self, line: Line) -> None:
        """A request is over, of whatever kind."""
        self.ended.observe(line)
        if line.method not in ("GET", "HEAD"):
            self._dirty = True

    async def watch(self, tenant: str) -> AsyncIterator[str]:
        """Server-sent events until the server ends or the watcher leaves. Raises ApiError 503 if too many watch."""
        if len(self._watchers) >= MOST_WATCHERS:
            raise ApiError(
                503, f"{MOST_WATCHERS} pages are open, which is the limit", "overloaded_error", retry_after=5
            )
        watcher = Watcher(tenant)
        try:
            hello = await self._hello(tenant)
            self._watchers.add(watcher)
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._collect())
            yield hello
            while (text := await watcher.queue.get()) is not None:
                yield text
        finally:
            self._watchers.discard(watcher)

    async def _hello(self, tenant: str) -> str:
        serving, machine = self._serving, shows_machine(self._serving)
        rows = await asyncio.to_thread(self._agent_rows, tenant)
        self._rows[tenant] = rows
        said: dict[str, Any] = {
            "now": time.time(),
            "model": serving.name,
            "tenant": None if serving.keys.is_open else tenant,
            "machine": machine,
            "agent_fields": AGENT_FIELDS,
            "agents": list(rows.values()),
            "ended": self.ended.of(tenant),
            "counted": self._counted(tenant),
        }
        if machine:
            self._layers = await asyncio.to_thread(layers, serving)
            said |= {
                "fields": FIELDS,
                "samples": [sample.as_row() for sample in self._samples],
                "budgets": await asyncio.to_thread(budgets, serving),
                "layers": self._layers,
            }
        return _sse("hello", said)

    async def _collect(self) -> None:
        """As long as anybody watches."""
        number, told = 0, self.ended.number
        while self._watchers and not self._serving.draining:
            await asyncio.sleep(EVERY_S)
            number += 1
            sample, moved = await asyncio.to_thread(take, self._serving)
            written, computed = self._counted(None)
            sample = replace(sample, written=written, computed=computed)
            if moved != self._moved:
                self._moved, self._dirty = moved, True
                self._blocks += 1
            if not self._samples or sample.at >= self._samples[-1].at + KEEP_EVERY_S:
                self._samples.append(sample)
            look = number % AGENTS_EVERY == 0 and (self._dirty or bool(self._serving.answering))
            if look:
                self._dirty = False
            since, told = told, self.ended.number
            for tenant in {watcher.tenant for watcher in self._watchers}:
                events = [("tick", self._tick(tenant, sample, since))]
                if look:
                    events += await self._changed_agents(tenant)
                self._tell(tenant, events)
            if number % 4 == 0 and shows_machine(self._serving):
                await self._tell_layers()
        for watcher in self._watchers:
            watcher.put(None)

    def _tick(self, tenant: str, sample: Sample, since: int) -> dict[str, Any]:
        said: dict[str, Any] = {
            "at": round(sample.at, 3),
            "blocks": self._blocks,
            "counted": self._counted(tenant),
            "active": [_active(one) for one in self._serving.answering if one.outcome.tenant == tenant],
        }
        if ended := self.ended.of(tenant, since):
            said["ended"] = ended
        if shows_machine(self._serving):
            said["sample"] = sample.as_row()
        return said

    def _counted(self, tenant: str | None) -> list[int]:
        """Tokens of answers, and of prompts that were computed, since the start: of what has ended and of what runs.
        None: of all tenants.
        """
        ended = self.ended
        written = ended.written.total() if tenant is None else ended.written[tenant]
        computed = ended.computed.total() if tenant is None else ended.computed[tenant]
        for one in self._serving.answering:
            if tenant in (None, one.outcome.tenant) and not one.joined:
                written += one.outcome.completion_tokens
                progress, receipt = one.progress, one.receipt
                if progress is not None and receipt is not None:
                    computed += max(0, progress.computed - receipt.cached_tokens)
        return [written, computed]

    async def _changed_agents(self, tenant: str) -> list[Event]:
        rows = await asyncio.to_thread(self._agent_rows, tenant)
        before, self._rows[tenant] = self._rows.get(tenant, {}), rows
        changed = [row for name, row in rows.items() if before.get(name) != row]
        gone = [name for name in before if name not in rows]
        return [("agents", {"changed": changed, "gone": gone})] if changed or gone else []

    def _agent_rows(self, tenant: str) -> dict[str, Row]:
        """On a thread."""
        found = self._serving.llm.agents.listed(tenant)[:MOST_AGENTS]
        return {agent.name: agent_row(agent) for agent in found}

    async def _tell_layers(self) -> None:
        found = await asyncio.to_thread(layers, self._serving)
        if found != self._layers:
            self._layers = found
            for tenant in {watcher.tenant for watcher in self._watchers}:
                self._tell(tenant, [("weights", found)])

    def _tell(self, tenant: str, events: list[Event]) -> None:
        text = "".join(_sse(name, data) for name, data in events)
        for watcher in [one for one in self._watchers if one.tenant == tenant]:
            if not watcher.put(text):
                self._watchers.discard(watcher)
                while not watcher.queue.empty():
                    watcher.queue.get_nowait()
                watcher.put(None)


def _active(one: Answering) -> dict[str, Any]:
    """A request that is being answered."""
    outcome, progress, receipt = one.outcome, one.progress, one.receipt
    since_s = one.since_s
    writing_s = since_s - outcome.ttft_s if outcome.ttft_s is not None else 0.0
    return {
        "id": outcome.id,
        "agent": receipt.agent if receipt is not None and receipt.agent else outcome.agent,
        "route": outcome.route,
        "since_s": round(since_s, 2),
        "tier": "" if receipt is None else receipt.tier,
        "cached_tokens": 0 if receipt is None else receipt.cached_tokens,
        "prompt_tokens": 0 if progress is None else progress.prompt_tokens,
        "computed": 0 if progress is None else progress.computed,
        "written": outcome.completion_tokens,
        "ttft_s": None if outcome.ttft_s is None else round(outcome.ttft_s, 4),
        "tok_s": round((outcome.completion_tokens - 1) / writing_s, 1) if writing_s > 0.05 else None,
    }


def _sse(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {_encode(data)}\n\n"

"""The routes of the Responses API: create, retrieve, delete, cancel, and what a response was asked.

A response that is stored is a point of a history in the agent store: it never changes, it can be continued
(`previous_response_id`) any number of times, also after a restart, and what was computed for it is not computed again.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from everwarm.errors import UnknownAgentError
from everwarm.events import Answer, FinishReason, Usage
from everwarm.llm import Generation, Point
from everwarm.server.active_request import ActiveRequest
from everwarm.server.errors import ApiError
from everwarm.server.joining import Joins, Speaker
from everwarm.server.leaving import unless_it_leaves
from everwarm.server.openai.content import tool_choice
from everwarm.server.openai.responses import output
from everwarm.server.openai.responses.items import Messages, Tools, messages_of, tools_of
from everwarm.server.openai.responses.output import ItemIds, new_id
from everwarm.server.openai.responses.request import ResponsesRequest
from everwarm.server.openai.responses.wire import ResponsesWire
from everwarm.server.request import Json, agent_of, check_choice, template_tools, tenant_of, with_ignored
from everwarm.server.response import respond
from everwarm.server.seals import Seals
from everwarm.server.serving import Serving
from everwarm.server.shared_answer import SharedAnswer
from everwarm.structured.asked import response_format
from everwarm.structured.grammar import Grammar
from everwarm.text.reasoning import Thinking
from everwarm.text.tool_calls.choice import ToolChoice

PREFIX = "resp_"


@dataclass(frozen=True, slots=True)
class Kept:
    """A stored response."""

    response: Json
    input: list[Json]
    messages: list[Json]  # of the conversation up to and with its answer, without instructions


def router(serving: Serving) -> APIRouter:
    """The routes."""
    api = APIRouter(prefix="/v1/responses")
    joins = Joins(serving)
    active: dict[tuple[str, str], SharedAnswer] = {}  # by tenant and id, while they are made

    @api.post("")
    async def create(body: ResponsesRequest, request: Request) -> Response:
        """Answer, and keep the answer unless `store` is false."""
        return await _create(serving, joins, body, request, active)

    @api.get("/{response_id}")
    async def retrieve(response_id: str, request: Request) -> Json:
        """A stored response."""
        tenant = tenant_of(request)
        kept: Kept = await serving.texts.work(request, lambda: _kept(serving, response_id, tenant))
        return kept.response

    @api.get("/{response_id}/input_items")
    async def input_items(response_id: str, request: Request) -> Json:
        """What a stored response was asked."""
        tenant = tenant_of(request)
        kept: Kept = await serving.texts.work(request, lambda: _kept(serving, response_id, tenant))
        first, last = (kept.input[0]["id"], kept.input[-1]["id"]) if kept.input else (None, None)
        return {"object": "list", "data": kept.input, "has_more": False, "first_id": first, "last_id": last}

    @api.delete("/{response_id}")
    async def delete(response_id: str, request: Request) -> Json:
        """Forget a stored response. Those that continue it stay."""
        tenant = tenant_of(request)

        def remove() -> None:
            _kept(serving, response_id, tenant)
            serving.llm.agents.delete(response_id, tenant)

        await serving.texts.work(request, remove)
        return {"id": response_id, "object": "response", "deleted": True}

    @api.post("/{response_id}/cancel")
    async def cancel(response_id: str, request: Request) -> Json:
        """Stop a response that is being written."""
        tenant = tenant_of(request)
        running = active.get((tenant, response_id))
        if running is None:
            kept: Kept = await serving.texts.work(request, lambda: _kept(serving, response_id, tenant))
            return kept.response
        running.cancel()
        return {"id": response_id, "object": "response", "status": "cancelled", "output": []}

    return api


async def _create(
    serving: Serving,
    joins: Joins,
    body: ResponsesRequest,
    request: Request,
    active: dict[tuple[str, str], SharedAnswer],
) -> Response:
    serving.check_priority(body.everwarm.priority)
    tenant, agent = tenant_of(request), agent_of(request) or body.everwarm.agent
    stored = bool(body.store) and body.everwarm.cache and not agent
    if agent and body.previous_response_id:
        raise ApiError(400, "previous_response_id: it names a history of its own; send it without X-Agent-Id")
    response_id = new_id()

    def read() -> tuple[Seals, Tools, Messages]:
        seals = Seals(serving.llm.agents.secret(tenant))
        return seals, tools_of(body.tools), messages_of(body.input, seals)

    seals, tools, asked = await unless_it_leaves(request, serving.texts.work(request, read))
    sealed = seals if "reasoning.encrypted_content" in (body.include or ()) else None
    ids = ItemIds(response_id, tools.custom, sealed)
    head = _head(serving, body, response_id)

    def tools_and_choice() -> tuple[Sequence[Json] | None, ToolChoice]:
        offered = template_tools(tools.offered)
        return offered, check_choice(tool_choice(body.tool_choice, body.parallel_tool_calls), offered)

    def start() -> Generation:
        before = _kept(serving, body.previous_response_id, tenant) if body.previous_response_id else None
        messages = [*(before.messages if before else ()), *asked.messages]
        serving.check_messages(len(messages))
        if not messages and not body.instructions:
            raise ApiError(400, "input: say something")
        given = _given(body.input, ids)

        def record(answer: Answer, finish: FinishReason, usage: Usage) -> Mapping[str, Any]:
            items = output.output_items(ids, answer, cut_off=finish == "length")
            return {
                "response": output.ended(head, finish, items, usage),
                "input": given,
                "instructions": body.instructions is not None,
            }

        system = [{"role": "system", "content": body.instructions}] if body.instructions is not None else []
        offered, choice = tools_and_choice()
        effort = body.reasoning.effort if body.reasoning else None
        return serving.llm.start(
            messages=[*system, *messages],
            tools=offered,
            tool_choice=choice,
            thinking=Thinking(None if effort is None else True, effort, None),
            max_tokens=body.max_output_tokens or serving.limits.answer_tokens or serving.context,
            agent=response_id if stored else agent,
            group="" if stored or agent else body.prompt_cache_key or "",
            tenant=tenant,
            context=serving.context,
            point=Point(body.previous_response_id, record) if stored else None,
            **options,
        )

    options = serving.sampling | body.options()
    wanted = body.text.format if body.text is not None else None

    def ask() -> Grammar | None:
        asked = None if wanted is None else response_format(wanted, "text.format")
        return serving.llm.answer_grammar(asked, *tools_and_choice())

    if wanted is not None or body.tools:
        options |= await unless_it_leaves(request, serving.grammars.options(ask))
    generation = await unless_it_leaves(request, serving.texts.work(request, start))
    speaker = Speaker(tenant, agent or "", "" if agent else body.prompt_cache_key or "")
    answer = await joins.open(request, speaker, [generation], lambda: ResponsesWire(head, ids))
    if not answer.begun:  # else it has another id
        active[tenant, response_id] = answer
        answer.when_over(lambda: active.pop((tenant, response_id), None))
    answering = ActiveRequest(serving, request, answer, agent or "", tenant)
    response = await respond(request, answering, answer.wire(), bool(body.stream))
    return with_ignored(response, _ignored(body, tools, asked.omitted))


def _head(serving: Serving, body: ResponsesRequest, response_id: str) -> Json:
    """What is known of a response before its answer."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": serving.name,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": bool(body.store),
        "temperature": serving.sampling["temperature"] if body.temperature is None else body.temperature,
        "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": serving.sampling["top_p"] if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def _given(items: str | list[Json], ids: ItemIds) -> list[Json]:
    """Input items as they are listed later: each has an id."""
    if isinstance(items, str):
        items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": items}]}]
    return [{"id": ids.of("in", number)} | item for number, item in enumerate(items)]


def _kept(serving: Serving, response_id: str, tenant: str) -> Kept:
    """A stored response. Raises ApiError 404."""
    unknown = ApiError(404, f"no response {response_id[:100]!r} is stored here", code="response_not_found")
    if not response_id.startswith(PREFIX):
        raise unknown
    store = serving.llm.agents
    try:
        history = store.history(store.find(response_id, tenant))
    except UnknownAgentError:
        raise unknown from None
    record = history.record
    if record is None or history.messages is None:
        raise ApiError(404, f"response {response_id[:100]!r} can't be read: {history.lost or 'it is incomplete'}")
    messages = list(history.messages)
    return Kept(record["response"], record["input"], messages[1:] if record["instructions"] else messages)


def _ignored(body: ResponsesRequest, tools: Tools, omitted: Iterable[str]) -> list[str]:
    """What had no effect."""
    return [*body.unknown, *(f"tools of type {kind}" for kind in tools.omitted), *(f"input {kind}" for kind in omitted)]

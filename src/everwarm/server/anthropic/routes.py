"""Anthropic's routes: messages, and the counting of their tokens."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from everwarm.server.active_request import ActiveRequest
from everwarm.server.anthropic.request import CountRequest, MessagesRequest
from everwarm.server.anthropic.session import session_of
from everwarm.server.anthropic.wire import MessageWire
from everwarm.server.leaving import unless_it_leaves
from everwarm.server.request import Json, agent_of, tenant_of, with_ignored
from everwarm.server.response import respond
from everwarm.server.serving import Serving


def router(serving: Serving) -> APIRouter:
    """The routes."""
    api, llm = APIRouter(), serving.llm

    @api.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        serving.check_priority(body.everwarm.priority)
        serving.check_messages(len(body.messages))
        tenant, agent = tenant_of(request), agent_of(request) or body.everwarm.agent
        group = session_of(body.metadata.user_id) if body.metadata and not agent else ""
        named = {"agent": agent, "tenant": tenant, "group": group, "context": serving.context}
        options = serving.sampling | body.options() | named
        if body.asks_for_grammar:
            options["constraint"] = await unless_it_leaves(request, serving.grammars.constraint(body.asked_grammar))
            options["after_reasoning"] = True
        elif body.forces_call:
            called = serving.grammars.constraint(lambda: llm.call_grammar(*body.tools_and_choice()))
            options["constraint"] = await unless_it_leaves(request, called)
            options["after_reasoning"] = True
        start = serving.texts.work(request, lambda: llm.start(**body.chat(), **options))
        active = ActiveRequest(serving, request, [await unless_it_leaves(request, start)], agent or "", tenant)
        wire = MessageWire(serving.name, body.max_tokens, kept=body.everwarm.cache and body.marks_cache)
        response = await respond(request, active, wire, bool(body.stream))
        return with_ignored(response, body.ignored)

    @api.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, request: Request) -> Json:
        def count() -> int:
            segments, add_bos = llm.segments(**body.chat())
            return len(llm.tokenizer.encode(segments, add_bos=add_bos))

        return {"input_tokens": await unless_it_leaves(request, serving.texts.work(request, count))}

    return api

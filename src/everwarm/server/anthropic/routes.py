"""Anthropic's routes: messages, and the counting of their tokens."""

from fastapi import APIRouter, Request
from fastapi.responses import Response

from everwarm.server.active_request import ActiveRequest
from everwarm.server.anthropic.request import CountRequest, MessagesRequest
from everwarm.server.anthropic.session import session_of
from everwarm.server.anthropic.wire import MessageWire
from everwarm.server.joining import Joins, Speaker
from everwarm.server.leaving import unless_it_leaves
from everwarm.server.request import Json, agent_of, tenant_of, with_ignored
from everwarm.server.response import respond
from everwarm.server.serving import Serving


def router(serving: Serving) -> APIRouter:
    """The routes."""
    api, llm, joins = APIRouter(), serving.llm, Joins(serving)

    @api.post("/v1/messages")
    async def messages(body: MessagesRequest, request: Request) -> Response:
        serving.check_priority(body.everwarm.priority)
        serving.check_messages(len(body.messages))
        tenant, agent = tenant_of(request), agent_of(request) or body.everwarm.agent
        group = session_of(body.metadata.user_id) if body.metadata and not agent else ""
        options = body.options() | {"agent": agent, "tenant": tenant, "group": group, "context": serving.context}
        if body.asks_for_grammar or body.tools:
            asked = serving.grammars.options(lambda: llm.answer_grammar(body.asked_grammar(), *body.tools_and_choice()))
            options |= await unless_it_leaves(request, asked)
        start = serving.texts.work(request, lambda: llm.start(**body.chat(), **options))
        generation = await unless_it_leaves(request, start)

        def wire() -> MessageWire:
            return MessageWire(serving.name, body.max_tokens, kept=body.everwarm.cache and body.marks_cache)

        answer = await joins.open(request, Speaker(tenant, agent or "", group), [generation], wire)
        active = ActiveRequest(serving, request, answer, agent or "", tenant)
        response = await respond(request, active, answer.wire(), bool(body.stream))
        return with_ignored(response, body.ignored)

    @api.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountRequest, request: Request) -> Json:
        def count() -> int:
            segments, add_bos = llm.segments(**body.chat())
            return len(llm.tokenizer.encode(segments, add_bos=add_bos))

        return {"input_tokens": await unless_it_leaves(request, serving.texts.work(request, count))}

    return api

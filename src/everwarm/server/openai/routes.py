"""OpenAI's routes: chat completions, completions, models, embeddings."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from everwarm.llm import DEFAULT_MAX_TOKENS, Generation
from everwarm.server.active_request import ActiveRequest
from everwarm.server.errors import ApiError
from everwarm.server.joining import Joins, Speaker
from everwarm.server.leaving import unless_it_leaves
from everwarm.server.openai.content import chat_messages, tool_choice
from everwarm.server.openai.request import ChatRequest, CompletionRequest, EmbeddingRequest, GenerationRequest
from everwarm.server.openai.wire import ChatWire, TextWire
from everwarm.server.request import Json, agent_of, check_choice, template_tools, tenant_of, with_ignored
from everwarm.server.response import respond
from everwarm.server.serving import Serving
from everwarm.server.wire import Wire
from everwarm.structured.grammar import Grammar
from everwarm.text.tool_calls.choice import ToolChoice


def router(serving: Serving) -> APIRouter:
    """The routes."""
    api, joins = APIRouter(), Joins(serving)

    @api.get("/v1/models")
    async def models() -> Json:
        known, first, last = [_model(serving, name) for name in serving.names], serving.names[0], serving.names[-1]
        return {"object": "list", "data": known, "has_more": False, "first_id": first, "last_id": last}

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> Json:
        if name not in serving.names:
            raise ApiError(404, f"model {name[:100]!r} is not served here; {serving.name} is")
        return _model(serving, name)

    @api.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        serving.check_messages(len(body.messages))
        options: Json = {
            "max_tokens": body.max_completion_tokens or body.max_tokens or serving.context,
            "top_logprobs": (body.top_logprobs or 0) if body.logprobs else 0,
        }

        def offered() -> tuple[Sequence[Json] | None, ToolChoice]:
            tools = template_tools(body.tools)
            return tools, check_choice(tool_choice(body.tool_choice, body.parallel_tool_calls), tools)

        def prompt() -> Json:
            tools, choice = offered()
            return {
                "messages": chat_messages(body.messages),
                "tools": tools,
                "tool_choice": choice,
                "thinking": body.asked_thinking(),
                "template_variables": body.chat_template_kwargs,
            }

        def ask() -> Grammar | None:
            return serving.llm.answer_grammar(body.asked_grammar(), *offered())

        def wire() -> Wire:
            return ChatWire(serving, body.n or 1, logprobs=bool(body.logprobs), usage=body.wants_usage)

        return await _answer(serving, joins, request, body, options, prompt, wire, ask if body.tools else None)

    @api.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        prompt = _prompt(body.prompt)
        logprobs, before = body.logprobs is not None, ""
        if logprobs:  # they say where tokens are in the text of prompt and answer
            spell = partial(serving.llm.detokenize, special=True)
            before = (
                prompt
                if isinstance(prompt, str)
                else await unless_it_leaves(request, serving.texts.work(request, lambda: spell(prompt)))
            )
        source: Json = {"prompt" if isinstance(prompt, str) else "tokens": prompt}
        options = {
            "max_tokens": body.max_tokens or DEFAULT_MAX_TOKENS,
            "top_logprobs": body.logprobs or 0,
        }
        count, usage = body.n or 1, body.wants_usage

        def wire() -> Wire:
            return TextWire(serving, count, logprobs=logprobs, usage=usage, prompt_chars=len(before))

        return await _answer(serving, joins, request, body, options, lambda: source, wire)

    @api.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest) -> Response:
        raise ApiError(400, f"{serving.name} is a model that writes text: it was not made for embeddings")

    return api


async def _answer(
    serving: Serving,
    joins: Joins,
    request: Request,
    body: GenerationRequest,
    options: Json,
    prompt: Callable[[], Json],
    wire: Callable[[], Wire],
    ask: Callable[[], Grammar | None] | None = None,
) -> Response:
    """`prompt` makes what the model reads; that takes a while if it is long. `ask` tells what the answer must follow,
    unless the body's own fields tell it.
    """
    serving.check_priority(body.everwarm.priority)
    count = body.n or 1
    if count > serving.limits.most_choices:
        raise ApiError(400, f"n: {count} answers at once, the limit is {serving.limits.most_choices}")
    tenant, agent = tenant_of(request), agent_of(request) or body.everwarm.agent
    group = "" if agent else body.prompt_cache_key or ""
    options = body.options() | options | {"agent": agent, "group": group, "tenant": tenant, "context": serving.context}
    if ask is not None or body.asks_for_grammar:
        options |= await unless_it_leaves(request, serving.grammars.options(ask or body.asked_grammar))
    seeds = [None if body.seed is None else (body.seed + number) % 2**64 for number in range(count)]

    def start() -> list[Generation]:
        first = serving.llm.start(**prompt(), **options, seed=seeds[0])
        return [first, *(first.another_choice(number, seeds[number]) for number in range(1, count))]

    generations = await unless_it_leaves(request, serving.texts.work(request, start))
    answer = await joins.open(request, Speaker(tenant, agent or "", group), generations, wire)
    active = ActiveRequest(serving, request, answer, agent or "", tenant)
    return with_ignored(await respond(request, active, answer.wire(), bool(body.stream)), body.ignored)


def _model(serving: Serving, name: str) -> Json:
    """With the fields that OpenAI's and Anthropic's clients read."""
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "everwarm",
        "type": "model",
        "display_name": serving.llm.config.name,
        "created_at": datetime.fromtimestamp(serving.created, UTC).isoformat(),
        "max_input_tokens": serving.context,
    }


def _prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> str | list[int]:
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if not prompt or not all(isinstance(token, int) for token in prompt):
        raise ApiError(400, "prompt: expected one text, or one list of token ids")
    return prompt  # type: ignore[return-value]

"""OpenAI's routes: chat completions, completions, models, embeddings."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from everwarm.llm import DEFAULT_MAX_TOKENS, Generation
from everwarm.server.active_request import ActiveRequest
from everwarm.server.errors import ApiError
from everwarm.server.leaving import unless_it_leaves
from everwarm.server.openai.content import chat_messages, tool_choice
from everwarm.server.openai.request import ChatRequest, CompletionRequest, EmbeddingRequest, GenerationRequest
from everwarm.server.openai.wire import ChatWire, TextWire
from everwarm.server.request import Json, agent_of, check_choice, template_tools, tenant_of, with_ignored
from everwarm.server.response import respond
from everwarm.server.serving import Serving
from everwarm.server.wire import Wire
from everwarm.text.tool_calls.choice import ToolChoice


def router(serving: Serving) -> APIRouter:
    """The routes."""
    api = APIRouter()

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
            "max_tokens": body.max_completion_tokens
            or body.max_tokens
            or serving.limits.answer_tokens
            or serving.context,
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

        if body.tool_choice not in (None, "auto", "none") and not body.asks_for_grammar:
            call = serving.grammars.constraint(lambda: serving.llm.call_grammar(*offered()))
            options["constraint"] = await unless_it_leaves(request, call)
            options["after_reasoning"] = True
        wire = ChatWire(
            serving,
            body.n or 1,
            logprobs=bool(body.logprobs),
            usage=body.wants_usage,
            timings=body.timings_per_token,
            progress=body.return_progress,
        )
        return await _answer(serving, request, body, options, [prompt], wire)

    @api.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        prompts = body.prompts(serving.limits.most_prompts)
        before = [""] * len(prompts)
        if body.logprobs is not None:  # they say where tokens are in the text of prompt and answer
            before = await unless_it_leaves(request, serving.texts.work(request, lambda: _texts(serving, prompts)))
        options = {
            "max_tokens": body.max_tokens or serving.limits.answer_tokens or DEFAULT_MAX_TOKENS,
            "top_logprobs": body.logprobs or 0,
        }
        wire = TextWire(
            serving,
            body.n or 1,
            logprobs=body.logprobs is not None,
            usage=body.wants_usage,
            timings=body.timings_per_token,
            progress=body.return_progress,
            prompt_chars=[len(text) for text in before],
        )
        return await _answer(serving, request, body, options, [partial(_source, one) for one in prompts], wire)

    @api.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest) -> Response:
        raise ApiError(400, f"{serving.name} is a model that writes text: it was not made for embeddings")

    return api


async def _answer(
    serving: Serving,
    request: Request,
    body: GenerationRequest,
    options: Json,
    prompts: Sequence[Callable[[], Json]],
    wire: Wire,
) -> Response:
    """`prompts` make what the model reads; that takes a while if it is long."""
    serving.check_priority(body.everwarm.priority)
    count = body.n or 1
    if count > serving.limits.most_choices:
        raise ApiError(400, f"n: {count} answers at once, the limit is {serving.limits.most_choices}")
    tenant, agent = tenant_of(request), agent_of(request) or body.everwarm.agent
    if agent and len(prompts) > 1:
        raise ApiError(400, f"prompt: {len(prompts)} of them, but an agent has one turn at a time; send one prompt")
    group = "" if agent else body.prompt_cache_key or ""
    named = {"agent": agent, "group": group, "tenant": tenant, "context": serving.context}
    options = serving.sampling | body.options() | options | named
    if body.asks_for_grammar:
        options["constraint"] = await unless_it_leaves(request, serving.grammars.constraint(body.asked_grammar))
        options["after_reasoning"] = True
    default = options.pop("seed")
    seed = default if body.seed is None else body.seed
    seeds = [None if seed is None else (seed + number) % 2**64 for number in range(count)]

    def start() -> list[Generation]:
        generations = []
        for number, prompt in enumerate(prompts):
            first = serving.llm.start(**prompt(), **options, seed=seeds[0], choice=number * count)
            others = (first.another_choice(number * count + other, seeds[other]) for other in range(1, count))
            generations += [first, *others]
        return generations

    generations = await unless_it_leaves(request, serving.texts.work(request, start))
    active = ActiveRequest(serving, request, generations, agent or "", tenant, len(prompts))
    return with_ignored(await respond(request, active, wire, bool(body.stream)), body.ignored)


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


def _source(prompt: str | list[int]) -> Json:
    """A prompt of plain completions, as an argument of `LLM.start`."""
    return {"prompt" if isinstance(prompt, str) else "tokens": prompt}


def _texts(serving: Serving, prompts: Sequence[str | list[int]]) -> list[str]:
    return [one if isinstance(one, str) else serving.llm.detokenize(one, special=True) for one in prompts]

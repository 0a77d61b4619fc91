"""From the body of a request to its response: what chat, plain completions and llama.cpp's API share."""

from collections.abc import Callable, Sequence

from fastapi import Request
from fastapi.responses import Response

from everwarm.llm import Generation
from everwarm.server.active_request import ActiveRequest
from everwarm.server.errors import ApiError
from everwarm.server.joining import Joins, Speaker
from everwarm.server.leaving import unless_it_leaves
from everwarm.server.openai.request import GenerationRequest
from everwarm.server.request import Json, agent_of, tenant_of, with_ignored
from everwarm.server.response import respond
from everwarm.server.serving import Serving
from everwarm.server.wire import Wire
from everwarm.structured.grammar import Grammar


async def answer(
    serving: Serving,
    joins: Joins,
    request: Request,
    body: GenerationRequest,
    options: Json,
    prompts: Sequence[Callable[[], Json]],
    wire: Callable[[], Wire],
    ask: Callable[[], Grammar | None] | None = None,
) -> Response:
    """`prompts` make what the model reads; that takes a while if it is long. `ask` tells what the answer must follow,
    unless the body's own fields tell it.
    """
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
    if ask is not None or body.asks_for_grammar:
        options |= await unless_it_leaves(request, serving.grammars.options(ask or body.asked_grammar))
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
    shared = await joins.open(request, Speaker(tenant, agent or "", group), generations, wire, len(prompts))
    active = ActiveRequest(serving, request, shared, agent or "", tenant)
    return with_ignored(await respond(request, active, shared.wire(), bool(body.stream)), body.ignored)

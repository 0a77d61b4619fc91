"""OpenAI's routes: chat completions, completions, models, embeddings."""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial

from fastapi import APIRouter, Request
from fastapi.responses import Response

from everwarm.llm import DEFAULT_MAX_TOKENS
from everwarm.server.errors import ApiError
from everwarm.server.joining import Joins
from everwarm.server.leaving import unless_it_leaves
from everwarm.server.openai.answering import answer
from everwarm.server.openai.request import ChatRequest, CompletionRequest, EmbeddingRequest
from everwarm.server.openai.wire import ChatWire, TextWire
from everwarm.server.request import Json
from everwarm.server.serving import Serving


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
            "max_tokens": body.max_completion_tokens
            or body.max_tokens
            or serving.limits.answer_tokens
            or serving.context,
            "top_logprobs": (body.top_logprobs or 0) if body.logprobs else 0,
        }

        wire = partial(
            ChatWire,
            serving,
            body.n or 1,
            logprobs=bool(body.logprobs),
            usage=body.wants_usage,
            timings=body.timings_per_token,
            progress=body.return_progress,
        )
        ask = partial(body.answer_grammar, serving.llm) if body.tools else None
        return await answer(serving, joins, request, body, options, [body.chat], wire, ask)

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

        wire = partial(
            TextWire,
            serving,
            body.n or 1,
            logprobs=body.logprobs is not None,
            usage=body.wants_usage,
            timings=body.timings_per_token,
            progress=body.return_progress,
            prompt_chars=[len(text) for text in before],
        )
        return await answer(serving, joins, request, body, options, [partial(_source, one) for one in prompts], wire)

    @api.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest) -> Response:
        raise ApiError(400, f"{serving.name} is a model that writes text: it was not made for embeddings")

    return api


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

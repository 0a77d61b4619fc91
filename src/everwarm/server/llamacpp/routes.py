"""llama.cpp's own routes. Its OpenAI routes are OpenAI's."""

from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from everwarm.errors import TemplateError
from everwarm.llm import MOST_RUNNING
from everwarm.server.errors import ApiError
from everwarm.server.joining import Joins
from everwarm.server.leaving import unless_it_leaves
from everwarm.server.llamacpp.request import (
    ApplyTemplateRequest,
    LlamaCompletionRequest,
    LlamaDetokenizeRequest,
    LlamaTokenizeRequest,
    Prompt,
    checked_prompt,
    encode,
)
from everwarm.server.llamacpp.wire import CompletionWire
from everwarm.server.openai.answering import answer
from everwarm.server.openai.request import ChatRequest
from everwarm.server.request import Json
from everwarm.server.serving import Serving
from everwarm.server.tokens import pieces

_CALLED = {"repetition_penalty": "repeat_penalty"}
"""Fields of our sampling that have another name there."""


def router(serving: Serving) -> APIRouter:
    """The routes."""
    api, llm, joins = APIRouter(tags=["llama.cpp"]), serving.llm, Joins(serving)

    @api.post("/completion")
    async def completion(body: LlamaCompletionRequest, request: Request) -> Response:
        """A completion in llama.cpp's form; several prompts give a list."""
        prompts = body.prompts(serving.limits.most_prompts)

        def texts() -> tuple[list[str], dict[int, float]]:
            spelt = [one if isinstance(one, str) else _spelt(serving, one) for one in prompts]
            return spelt, body.biases(llm)

        spelt, biases = await unless_it_leaves(request, serving.texts.work(request, texts))
        most = body.max_tokens or serving.limits.answer_tokens or serving.context
        options: Json = {"max_tokens": most, "top_logprobs": body.n_probs or 0, "logit_bias": biases}

        def wire() -> CompletionWire:
            return CompletionWire(
                serving,
                body.n or 1,
                settings=_settings(serving, body, biases),
                prompts=spelt,
                return_tokens=bool(body.return_tokens),
                fields=body.response_fields or (),
                progress=bool(body.return_progress),
            )

        sources = [partial(_source, serving, one) for one in prompts]
        return await answer(serving, joins, request, body, options, sources, wire)

    @api.post("/tokenize")
    async def tokenize(body: LlamaTokenizeRequest, request: Request) -> Json:
        """A text as tokens, in llama.cpp's form."""
        prompt, special = checked_prompt(body.content), body.parse_special is not False

        def work() -> list[Any]:
            ids = encode(llm, prompt, add_bos=bool(body.add_special), special=special)
            return pieces(llm, ids) if body.with_pieces else ids

        return {"tokens": await unless_it_leaves(request, serving.texts.work(request, work))}

    @api.post("/detokenize")
    async def detokenize(body: LlamaDetokenizeRequest, request: Request) -> Json:
        """Tokens as a text, in llama.cpp's form."""
        work = serving.texts.work(request, lambda: llm.detokenize(body.tokens, special=True))
        return {"content": await unless_it_leaves(request, work)}

    @api.post("/apply-template")
    async def apply_template(body: ApplyTemplateRequest, request: Request) -> Json:
        """What the model would read."""

        def prompt() -> str:
            begins = body.add_generation_prompt is not False
            segments, _ = llm.segments(**body.chat(), add_generation_prompt=begins)
            return "".join(segment.text for segment in segments)

        return {"prompt": await unless_it_leaves(request, serving.texts.work(request, prompt))}

    @api.post("/v1/chat/completions/input_tokens")
    async def input_tokens(body: ChatRequest, request: Request) -> Json:
        """How many tokens the model would read."""

        def count() -> int:
            segments, add_bos = llm.segments(**body.chat())
            return len(llm.tokenizer.encode(segments, add_bos=add_bos))

        counted = await unless_it_leaves(request, serving.texts.work(request, count))
        return {"object": "response.input_tokens", "input_tokens": counted}

    @api.get("/props")
    async def props() -> Json:
        """What is served, and how requests are sampled that don't say so."""
        try:
            template = llm.template.source()
        except TemplateError:
            template = ""
        known = serving.llm.tokenizer
        bos, eos = ("" if one is None else known.token_text(one) for one in (known.bos_id, known.eos_id))
        parameters = _sampling(serving.sampling) | {"n_predict": serving.limits.answer_tokens or -1}
        return {
            "default_generation_settings": {"params": parameters, "n_ctx": serving.context},
            "total_slots": min(MOST_RUNNING, serving.limits.most_queued),
            "model_alias": serving.name,
            "model_path": llm.path.name,
            "modalities": {"vision": False, "audio": False},
            "chat_template": template,
            "bos_token": bos,
            "eos_token": eos,
            "build_info": f"everwarm {version('everwarm')}",
        }

    return api


def _source(serving: Serving, prompt: Prompt) -> Json:
    """A prompt as arguments of `LLM.start`."""
    if isinstance(prompt, str):
        return {"prompt": prompt, "special": True}
    if not prompt:
        raise ApiError(400, "prompt: it is empty; send a text, or token ids")
    return {"tokens": encode(serving.llm, prompt, add_bos=True)}


def _spelt(serving: Serving, prompt: list[int | str]) -> str:
    return "".join(part if isinstance(part, str) else serving.llm.detokenize([part], special=True) for part in prompt)


def _sampling(sampling: Json) -> Json:
    return {_CALLED.get(name, name): value for name, value in sampling.items()}


def _settings(serving: Serving, body: LlamaCompletionRequest, biases: dict[int, float]) -> Json:
    """`generation_settings`."""
    chosen = {name: value for name, value in body.options().items() if name in serving.sampling}
    most = body.max_tokens or serving.limits.answer_tokens or -1
    seed = serving.sampling["seed"] if body.seed is None else body.seed
    return _sampling(serving.sampling | chosen) | {
        "seed": seed,
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop or [],
        "max_tokens": most,
        "n_predict": most,
        "ignore_eos": body.ignore_eos,
        "stream": bool(body.stream),
        "logit_bias": [{"token": token, "bias": bias} for token, bias in biases.items()],
        "n_probs": body.n_probs or 0,
        "grammar": body.grammar or "",
        "timings_per_token": bool(body.timings_per_token),
    }

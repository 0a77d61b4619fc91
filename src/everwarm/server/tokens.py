"""Text to tokens and back."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from everwarm.llm import LLM
from everwarm.server.leaving import unless_it_leaves
from everwarm.server.openai.content import chat_messages
from everwarm.server.request import Json, template_tools
from everwarm.server.serving import Serving


class TokenizeRequest(BaseModel):
    """`POST /v1/tokenize`: a text as it is (no BOS), or messages as the model would read them before it answers."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    text: str | None = None
    messages: Annotated[list[Json], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = None
    special: bool = False  # names of control tokens in the text are those tokens
    add_special: bool = False  # a text begins with BOS, if the model's prompts do
    with_pieces: bool = False  # each token with its text

    @model_validator(mode="after")
    def _one(self) -> "TokenizeRequest":
        if (self.text is None) == (self.messages is None):
            raise ValueError("give exactly one of text and messages")
        return self


class DetokenizeRequest(BaseModel):
    """`POST /v1/detokenize`."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]
    special: bool = False  # control tokens have their names, too


def pieces(llm: LLM, ids: Sequence[int]) -> list[Json]:
    """Each token with its text, or with its bytes if they are part of a character."""
    return [{"id": id_, "piece": _piece(llm.tokenizer.token_bytes(id_, special=True))} for id_ in ids]


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def router(serving: Serving) -> APIRouter:
    """The routes."""
    api, llm = APIRouter(), serving.llm

    @api.post("/v1/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Json:
        def encode() -> list[int]:
            if body.messages is None:
                add_bos = body.add_special and llm.tokenizer.add_bos
                return llm.tokenizer.encode(body.text or "", special=body.special, add_bos=add_bos)
            segments, add_bos = llm.segments(messages=chat_messages(body.messages), tools=template_tools(body.tools))
            return llm.tokenizer.encode(segments, add_bos=add_bos)

        ids = await unless_it_leaves(request, serving.texts.work(request, encode))
        return {"tokens": pieces(llm, ids) if body.with_pieces else ids, "count": len(ids)}

    @api.post("/v1/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Json:
        work = serving.texts.work(request, lambda: llm.detokenize(body.tokens, body.special))
        return {"text": await unless_it_leaves(request, work)}

    return api

"""Text to tokens and back."""

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from everwarm.server.content import Json, chat_message, checked_tools
from everwarm.server.serving import Serving


class TokenizeRequest(BaseModel):
    """`POST /v1/tokenize`: a text as it is (no BOS), or messages as the model would read them before it answers."""

    model_config = ConfigDict(extra="forbid")
    model: str | None = None
    text: str | None = None
    messages: Annotated[list[Json], Field(min_length=1, fail_fast=True)] | None = None
    tools: Annotated[list[Json], Field(fail_fast=True)] | None = None
    special: bool = False  # names of control tokens in the text are those tokens

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


def router(serving: Serving) -> APIRouter:
    """The routes."""
    api, llm = APIRouter(), serving.llm

    @api.post("/v1/tokenize")
    async def tokenize(asked: TokenizeRequest, request: Request) -> Json:
        serving.tenant(request)

        def encode() -> list[int]:
            if asked.messages is None:
                return llm.tokenize(asked.text or "", special=asked.special)
            messages = [chat_message(message, f"messages.{number}") for number, message in enumerate(asked.messages)]
            segments, add_bos = llm.segments(messages=messages, tools=checked_tools(llm, asked.tools))
            return llm.tokenizer.encode(segments, add_bos=add_bos)

        ids = await serving.texts.work(request, encode)
        return {"tokens": ids, "count": len(ids)}

    @api.post("/v1/detokenize")
    async def detokenize(asked: DetokenizeRequest, request: Request) -> Json:
        serving.tenant(request)
        return {"text": await serving.texts.work(request, lambda: llm.detokenize(asked.tokens, asked.special))}

    return api

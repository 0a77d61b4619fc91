"""A real server whose model is made to say a given text: tokens of a text, control tokens where it has their names."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from openai import OpenAI
from running import Running, running

from output_parsers import Says
from tiny import Tiny

HI: Any = [{"role": "user", "content": "Hi"}]

END = 258
"""The token `<|im_end|>` of a tiny model."""

THINKING_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['reasoning_content'] %}{{ '<think>' + m['reasoning_content'] + '</think>' }}{% endif %}"
    "{{ (m['content'] or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if reasoning_effort is defined %}{{ 'effort ' + reasoning_effort + '\n' }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking %}{{ '<think>\n' }}{% else %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""ChatML of a model that thinks unless it is told not to; the prompt opens its reasoning."""


@contextmanager
def served(home: Path, template: str, **settings: object) -> Iterator[Running]:
    """A tiny model with this chat template."""
    Tiny(context=8192, template=template).write(home / "tiny.gguf")
    with running(home / "tiny.gguf", home, **settings) as server:
        yield server


def says(server: Running, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """From now on the model says this."""
    llm = server.llm
    start = getattr(llm.start, "func", llm.start)
    ids = [*llm.tokenize(answer, special=True), END]
    monkeypatch.setattr(llm, "start", partial(start, constraint=partial(Says, ids, llm.config.vocab_size)))


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    """OpenAI's client of a file's `server`."""
    with OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(server: Running) -> Iterator[Anthropic]:
    """Anthropic's client of a file's `server`."""
    with Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        yield client

"""The chat format of a loaded model: by the template of its file, or by the one that a user gives instead."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from everwarm.errors import ConfigError
from everwarm.opening import read_whole
from everwarm.text.chat import KEY, ChatTemplate
from everwarm.text.chat_format import ChatFormat
from everwarm.text.tokenizer import Tokenizer

MOST_TEMPLATE = 1 << 20
"""Bytes of a chat template that a user gives."""


def model_chat(
    metadata: Mapping[str, Any], tokenizer: Tokenizer, own: str | None, *, tool_parser: str, lenient: bool
) -> ChatFormat:
    """How a file's model writes conversations; `own` replaces its template. Raises TemplateError."""
    control, bos, eos = tokenizer.special_tokens, tokenizer.bos_id, tokenizer.eos_id
    template = ChatTemplate.from_metadata(
        metadata if own is None else {**metadata, KEY: own},
        special_tokens=control,
        bos="" if bos is None else tokenizer.token_text(bos),
        eos="" if eos is None else tokenizer.token_text(eos),
    )
    return ChatFormat(template, frozenset(control), tool_parser=tool_parser, lenient=lenient)


def own_template(text: str, path: str) -> str | None:
    """A chat template that is used instead of the model's own. Raises ConfigError."""
    if not text:
        return _template_text(path)
    if path:
        raise ConfigError("chat_template and chat_template_file: give only one of them")
    if "{{" not in text and "{%" not in text:
        raise ConfigError(
            f"chat_template {text[:50]!r}: it writes no message; give the template itself (Jinja), or its file as "
            "chat_template_file"
        )
    return text


def _template_text(path: str) -> str | None:
    if not path:
        return None
    try:
        data = read_whole(Path(path).expanduser())
        if len(data) > MOST_TEMPLATE:
            raise ConfigError(f"chat_template_file {path}: {len(data):,} bytes, the limit is {MOST_TEMPLATE:,}")
        return data.decode()
    except OSError as error:
        raise ConfigError(f"chat_template_file {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"chat_template_file {path}: it is not UTF-8") from None

"""What a history must be before anything is done with it: one from elsewhere may say anything.

Tokens must be in the model's vocabulary, because they index its embedding; this package sees no model, so whoever opens
the store says how large the vocabulary is. Messages must be JSON as a client could have sent it, because they are shown
to clients and given to chat templates: of bounded depth, text that can be encoded, finite numbers.
"""

import math
from collections.abc import Sequence
from typing import Any

from everwarm.errors import StoreError
from everwarm.kv.chain import U32

MOST_DEPTH = 80
"""Nesting of messages. Clients may send 64 levels."""


def check_tokens(tokens: U32, vocab_size: int | None) -> None:
    """Raises StoreError. None: the vocabulary is not known here, so it is checked where it is."""
    if vocab_size is None or not len(tokens):
        return
    greatest = int(tokens.max())
    if greatest >= vocab_size:
        raise StoreError(f"token {greatest:,} is not in the model's vocabulary of {vocab_size:,}")


def check_messages(messages: Sequence[Any] | None) -> None:
    """Raises StoreError."""
    for message in messages or ():
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise StoreError("messages that are none: each must be an object with a role")
    level: list[Any] = list(messages or ())
    depth = 1
    while level:
        if depth > MOST_DEPTH:
            raise StoreError(f"messages are nested more than {MOST_DEPTH} deep")
        deeper: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                deeper += value.keys()
                deeper += value.values()
            elif isinstance(value, list):
                deeper += value
            elif isinstance(value, str):
                _check_text(value)
            elif isinstance(value, float) and not math.isfinite(value):
                raise StoreError("messages with a number that is none (NaN or infinity)")
        level, depth = deeper, depth + 1


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise StoreError("messages with half a character (a lone surrogate)") from None

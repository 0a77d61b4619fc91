"""Byte pair encoding over characters (`tokenizer.ggml.model` = gemma4).

In: text without special tokens. Out: token ids; and for each token, the bytes that it stands for.

Spaces are written as U+2581. Text is cut into lines and runs of line feeds; the characters of a piece are merged pair
by pair, best rank first. A run of line feeds that is a token is that token. A character that ends up as no token is
spelled in byte tokens (`<0x0A>`); a byte without one is dropped.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from everwarm.text.bpe import Merger
from everwarm.text.least import LeastTokens, swallowed
from everwarm.text.pace import in_slices
from everwarm.text.spaces import SPACE, word_boundary
from everwarm.text.vocabulary import Kind, Vocabulary

_BYTE_NAMES = [f"<0x{byte:02X}>" for byte in range(256)]
_LINES = re.compile(r"[^\n]+|\n+")
_REMEMBERED_WORDS = 1 << 16
_LONGEST_REMEMBERED = 32


class CharacterPairEncoder:
    """Encodes text with one vocabulary and its merges."""

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str]) -> None:
        self._merger = Merger(vocabulary, merges, _BYTE_NAMES)
        control = vocabulary.of_kind(Kind.CONTROL, Kind.UNKNOWN)
        self._line_feeds = {
            text: (id_,) for text, id_ in vocabulary.ids.items() if not text.strip("\n") and text not in control
        }
        self._cut = word_boundary(text for text in vocabulary.texts if text not in control)
        self._remembered = lru_cache(_REMEMBERED_WORDS)(self._merge)

    def encode(self, text: str) -> Iterator[list[int]]:
        """The ids of `text`, which must hold no surrogates, slice by slice."""
        lines = _LINES.findall(text.replace(" ", SPACE))
        for words in in_slices([word for line in lines for word in self._cut.split(line)]):
            ids: list[int] = []
            for word in words:
                ids.extend(self._remembered(word) if len(word) <= _LONGEST_REMEMBERED else self._merge(word))
            yield ids

    def spelt(self, text: str) -> bytes:
        """What tokens spell."""
        return text.replace(" ", SPACE).encode("utf-8", "ignore")

    def least_tokens(self, vocabulary: Vocabulary) -> LeastTokens:
        """How many tokens a text has at least."""
        control = vocabulary.of_kind(Kind.CONTROL, Kind.UNKNOWN)
        lacking = {byte for byte, name in enumerate(_BYTE_NAMES) if name not in vocabulary.ids or name in control}
        return LeastTokens(
            (self.spelt(text) for text in vocabulary.texts if text not in control), lacking | swallowed(vocabulary)
        )

    def piece_bytes(self, text: str) -> bytes:
        """What a normal token stands for."""
        return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")

    def _merge(self, word: str) -> tuple[int, ...]:
        return self._line_feeds.get(word) or self._merger.ids(word)

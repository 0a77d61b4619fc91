"""SentencePiece's byte pair encoding (`tokenizer.ggml.model` = llama): Llama 2, Mistral, Phi-3, Gemma.

In: text without special tokens. Out: token ids; and for each token, the bytes that it stands for.

Spaces are written as U+2581. Two neighbours merge if together they are a token; the one with the best score goes first,
the leftmost of equals. A character that ends up as no token is spelled in byte tokens.

Text is cut into words where no token can cross (`spaces`), and the ids of words are remembered.

Text never becomes a control or unknown token, even where merges could put one together.
"""

from collections.abc import Iterator
from functools import lru_cache
from heapq import heapify, heappop, heappush

from everwarm.errors import TokenizerError
from everwarm.text.least import LeastTokens, swallowed
from everwarm.text.pace import in_slices
from everwarm.text.spaces import SPACE, word_boundary
from everwarm.text.vocabulary import Kind, Vocabulary

_REMEMBERED_WORDS = 1 << 16
_LONGEST_REMEMBERED = 32


class SentencePiece:
    """Encodes text with one vocabulary and its scores."""

    def __init__(self, vocabulary: Vocabulary, scores: list[float]) -> None:
        self._ids = dict(vocabulary.ids)
        for text in vocabulary.of_kind(Kind.CONTROL, Kind.UNKNOWN, Kind.BYTE):
            del self._ids[text]
        self._scores = scores
        self._byte_ids = _byte_ids(vocabulary)
        self._cut = word_boundary(self._ids)
        self._remembered = lru_cache(_REMEMBERED_WORDS)(self._merge)

    def encode(self, text: str) -> Iterator[list[int]]:
        """The ids of `text`, which must hold no surrogates, slice by slice."""
        for words in in_slices(self._cut.split(text.replace(" ", SPACE))):
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
        dropped = {byte for space in swallowed(vocabulary) for byte in self.spelt(chr(space))}
        return LeastTokens((self.spelt(text) for text in vocabulary.texts if text not in control), dropped)

    def piece_bytes(self, text: str) -> bytes:
        """What a normal token stands for."""
        return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")

    def _merge(self, word: str) -> tuple[int, ...]:
        token, scores, size = self._ids.get, self._scores, len(word)
        # Symbols are stretches of the word, named by where they start. ends[i] is where symbol i ends, 0 once it is
        # part of another; before[i] is the symbol to its left.
        ends = list(range(1, size + 1))
        before = list(range(-1, size - 1))

        heap = [  # (minus score, start of the left symbol, end of the right one)
            (-scores[id_], start, start + 2)
            for start in range(size - 1)
            if (id_ := token(word[start : start + 2])) is not None
        ]
        heapify(heap)

        while heap:
            _, left, end = heappop(heap)
            right = ends[left]
            if not right or right >= end or ends[right] != end:
                continue  # one of the two has merged with another since
            ends[left], ends[right] = end, 0
            if end < size:
                before[end] = left
                if (id_ := token(word[left : ends[end]])) is not None:
                    heappush(heap, (-scores[id_], left, ends[end]))
            if left and (id_ := token(word[before[left] : end])) is not None:
                heappush(heap, (-scores[id_], before[left], end))

        ids: list[int] = []
        start = 0
        while start < size:
            symbol = word[start : ends[start]]
            start = ends[start]
            if (id_ := token(symbol)) is not None:
                ids.append(id_)
            else:
                ids.extend(self._byte_ids[byte] for byte in symbol.encode("utf-8"))
        return tuple(ids)


def _byte_ids(vocabulary: Vocabulary) -> list[int]:
    """The token for each byte: `<0x..>`, else the character itself, else the unknown token."""
    ids = []
    for byte in range(256):
        names = [f"<0x{byte:02X}>", *([chr(byte)] if byte < 0x80 else [])]
        id_ = next((vocabulary.ids[name] for name in names if name in vocabulary.ids), vocabulary.unknown_id)
        if id_ is None:
            raise TokenizerError(f"tokenizer.ggml.tokens: no token for byte 0x{byte:02X}, and no unknown token either")
        ids.append(id_)
    return ids

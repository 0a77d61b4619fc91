"""Byte-level byte pair encoding (`tokenizer.ggml.model` = gpt2).

In: text without special tokens. Out: token ids; and for each token, the bytes that it stands for.

The text is cut into words (`words`); the bytes of a word, written as 256 printable characters, are merged pair by pair,
best rank first, by the Rust code of `tokenizers`. The same words return all the time, so their ids are remembered.

Text never becomes a control or unknown token. If the vocabulary lacks a token for a byte (SmolLM2's lacks some control
characters), that byte is dropped: the model has no way to say it.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain

from tokenizers import Tokenizer, models

from everwarm.errors import TokenizerError
from everwarm.text.least import LeastTokens, swallowed
from everwarm.text.pace import in_slices
from everwarm.text.pretokenizers import PreTokenizer
from everwarm.text.vocabulary import Kind, Vocabulary
from everwarm.text.words import WordSplitter

_REMEMBERED_WORDS = 1 << 16
_LONGEST_REMEMBERED = 32
_LONG_WORD = 4096


def _byte_alphabet() -> str:
    """The character for each byte: itself if it is printable Latin-1, else the next free one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_ALPHABET = _byte_alphabet()
_BYTE_OF_CHARACTER = {character: bytes([byte]) for byte, character in enumerate(BYTE_ALPHABET)}


class BytePairEncoder:
    """Encodes text with one vocabulary and its merges."""

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], pre: PreTokenizer) -> None:
        self._splitter = WordSplitter(pre.patterns)
        self._merger = Merger(vocabulary, merges, BYTE_ALPHABET, ignore_merges=pre.ignore_merges)
        self._remembered = lru_cache(_REMEMBERED_WORDS)(self._merge)

    def encode(self, text: str) -> Iterator[list[int]]:
        """The ids of `text`, which must hold no surrogates, slice by slice."""
        for words in in_slices(self._splitter.split(text)):
            ids: list[int] = []
            for word in words:
                ids.extend(self._remembered(word) if len(word) <= _LONGEST_REMEMBERED else self._merge(word))
            yield ids

    def spelt(self, text: str) -> bytes:
        """What tokens spell."""
        return text.encode("utf-8", "ignore")

    def least_tokens(self, vocabulary: Vocabulary) -> LeastTokens:
        """How many tokens a text has at least."""
        control = vocabulary.of_kind(Kind.CONTROL, Kind.UNKNOWN)
        pieces = (self.piece_bytes(text) for text in vocabulary.texts if text not in control)
        user_defined = (self.spelt(text) for text in vocabulary.of_kind(Kind.USER_DEFINED))
        lacking = {byte for byte, name in enumerate(BYTE_ALPHABET) if name not in vocabulary.ids or name in control}
        return LeastTokens(chain(pieces, user_defined), lacking | swallowed(vocabulary))

    def piece_bytes(self, text: str) -> bytes:
        """What a normal token stands for. Characters outside the byte alphabet stand for themselves."""
        alphabet = _BYTE_OF_CHARACTER
        return b"".join(alphabet.get(c) or c.encode("utf-8", "surrogateescape") for c in text)

    def _merge(self, word: str) -> tuple[int, ...]:
        return self._merger.ids(word.encode("utf-8").decode("latin-1").translate(BYTE_ALPHABET))


class Merger:
    """The merges of a vocabulary, applied to one word at a time by the Rust code of `tokenizers`.

    `byte_names` are the texts of the tokens for the 256 bytes. A byte without such a token is dropped.
    """

    def __init__(
        self, vocabulary: Vocabulary, merges: Sequence[str], byte_names: Sequence[str], *, ignore_merges: bool = False
    ) -> None:
        self._size = len(vocabulary.texts)
        self._model = _build_model(vocabulary, merges, byte_names, ignore_merges)
        self._beside = Tokenizer(self._model)

    def ids(self, word: str) -> tuple[int, ...]:
        """The tokens of a word. A character that is no token is spelled in tokens for its bytes."""
        if len(word) < _LONG_WORD:
            ids = [token.id for token in self._model.tokenize(word)]
        else:  # the same, while other threads run
            ids = self._beside.encode_batch_fast([word], add_special_tokens=False)[0].ids
        return tuple(number for number in ids if number < self._size)


def _build_model(
    vocabulary: Vocabulary, merges: Sequence[str], byte_names: Sequence[str], ignore_merges: bool
) -> models.BPE:
    ids = dict(vocabulary.ids)
    control = vocabulary.of_kind(Kind.CONTROL, Kind.UNKNOWN)
    for text in control:
        del ids[text]
    # A byte without a token must still keep its neighbours apart: it gets an id beyond the vocabulary, dropped later.
    for byte, name in enumerate(byte_names):
        ids.setdefault(name, len(vocabulary.texts) + byte)
    ranked = dict.fromkeys(merges)  # of equal merges the first counts; `tokenizers` would take the last
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in ranked)]
    pairs = [(left, right) for left, right in pairs if left + right not in control]
    try:
        return models.BPE(ids, pairs, cache_capacity=0, ignore_merges=ignore_merges, byte_fallback=True)
    except Exception:
        # It says little about what it dislikes. Leave out texts that were no UTF-8, and merges that make no token.
        ids = {text: id_ for text, id_ in ids.items() if _is_valid(text)}
        pairs = [(left, right) for left, right in pairs if left in ids and right in ids and left + right in ids]
    try:
        return models.BPE(ids, pairs, cache_capacity=0, ignore_merges=ignore_merges, byte_fallback=True)
    except Exception as error:
        raise TokenizerError(f"tokenizer.ggml.merges: {error}") from error


def _is_valid(text: str) -> bool:
    """False for a text that was no UTF-8 in the file: no word can contain it."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)

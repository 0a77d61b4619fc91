"""Text to token ids and back, as the GGUF file's metadata say.

In: metadata of a model file. Out: a `Tokenizer`, whose ids are llama.cpp's for the same file.

Text and special tokens are kept apart. In plain text nothing is special: a literal `<|im_end|>` is spelled out and
can't end a message. Special tokens come from segments marked as such, or from text that the caller calls `special`.
Only user-defined tokens (a file's own kind for runs of spaces, tags and the like) are found in plain text as well.

Bytes that are no UTF-8 decode to U+FFFD; a lone surrogate in a `str` is encoded as if it were U+FFFD.
"""

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from types import MappingProxyType
from typing import Protocol

from everwarm.errors import TokenizerError
from everwarm.text.bpe import BytePairEncoder
from everwarm.text.character_bpe import CharacterPairEncoder
from everwarm.text.least import LeastTokens, without_replaced
from everwarm.text.pretokenizers import pretokenizer
from everwarm.text.sentencepiece import SentencePiece
from everwarm.text.specials import SPACES, SpecialFinder
from everwarm.text.vocabulary import Kind, Vocabulary, flag, numbers, read_vocabulary, strings
from everwarm.types import Metadata, Segment

_log = logging.getLogger(__name__)
_SURROGATE = re.compile("[\ud800-\udfff]")
_MODELS = ("gpt2", "llama", "gemma4")


class Encoder(Protocol):
    """What `gpt2`, `llama` and `gemma4` vocabularies have in common: plain text in, ids out."""

    def encode(self, text: str) -> Iterator[list[int]]:
        """Slice by slice, so that whoever asks can stop."""

    def piece_bytes(self, text: str) -> bytes: ...

    def spelt(self, text: str) -> bytes:
        """The text as tokens spell it."""

    def least_tokens(self, vocabulary: Vocabulary) -> LeastTokens:
        """Of what `spelt` returns."""


class Tokenizer:
    """One model's tokenizer. Build it with `from_metadata`; it can be used from several threads."""

    def __init__(
        self, vocabulary: Vocabulary, encoder: Encoder, *, add_bos: bool, add_eos: bool, space_prefix: bool
    ) -> None:
        self._vocabulary = vocabulary
        self._encoder = encoder
        self.vocab_size = len(vocabulary.texts)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.eog_ids = vocabulary.eog_ids
        """Tokens that end a generation: the file's EOS, and those known by name."""
        self.add_bos = add_bos
        """Whether a prompt should begin with BOS; `encode` leaves that to its caller."""
        self.add_eos = add_eos
        self.space_prefix = space_prefix
        """Whether a space is put before text that begins the prompt or follows a special token."""
        self.special_tokens: Mapping[str, int] = MappingProxyType(vocabulary.of_kind(Kind.CONTROL, Kind.UNKNOWN))
        """Control tokens by their text; the unknown token counts as one."""
        self._user_defined = SpecialFinder(vocabulary.of_kind(Kind.USER_DEFINED), vocabulary.strip_after)
        self._bytes: list[bytes | None] = [None] * self.vocab_size

    @classmethod
    def from_metadata(cls, metadata: Metadata) -> "Tokenizer":
        """The tokenizer that a file's metadata describe."""
        model = metadata.get("tokenizer.ggml.model")
        if model is None:
            raise TokenizerError("tokenizer.ggml.model is missing: the file holds no tokenizer")
        if model not in _MODELS:
            raise TokenizerError(f"tokenizer.ggml.model: {model!r} is not supported (known: {', '.join(_MODELS)})")
        encoder: Encoder
        if "gemma4" in (model, metadata.get("tokenizer.ggml.pre")):  # some converters write `llama` or `gpt2` for model
            vocabulary = read_vocabulary(metadata, default_ids={})
            encoder = CharacterPairEncoder(vocabulary, strings(metadata, "tokenizer.ggml.merges"))
            return cls(
                vocabulary,
                encoder,
                add_bos=vocabulary.bos_id is not None,  # whatever the file says: the models need it
                add_eos=flag(metadata, "tokenizer.ggml.add_eos_token", False),
                space_prefix=False,
            )
        if model == "gpt2":
            pre = pretokenizer(_pretokenizer_name(metadata))
            vocabulary = read_vocabulary(metadata, default_ids={"bos": 11, "eos": 11})
            encoder = BytePairEncoder(vocabulary, strings(metadata, "tokenizer.ggml.merges"), pre)
            add_bos, space_prefix = pre.add_bos, False
        else:
            vocabulary = read_vocabulary(metadata, default_ids={"bos": 1, "eos": 2, "unknown": 0})
            scores = numbers(metadata, "tokenizer.ggml.scores", len(vocabulary.texts))
            if scores is None:
                raise TokenizerError("tokenizer.ggml.scores is missing: a SentencePiece vocabulary can't do without")
            encoder = SentencePiece(vocabulary, scores)
            add_bos = True
            space_prefix = flag(metadata, "tokenizer.ggml.add_space_prefix", True)
        return cls(
            vocabulary,
            encoder,
            add_bos=flag(metadata, "tokenizer.ggml.add_bos_token", add_bos),
            add_eos=flag(metadata, "tokenizer.ggml.add_eos_token", False),
            space_prefix=space_prefix,
        )

    def encode(
        self,
        text: str | Sequence[Segment],
        *,
        special: bool = False,
        add_bos: bool = False,
        continuing: bool = False,
        most: int | None = None,
    ) -> list[int]:
        """The ids of a text or of segments. With `special`, control tokens in a text count as what they are.

        Neighbouring plain segments are one text: where a template ends and a message begins leaves no trace in the ids.
        `continuing` says that the text goes on where other text has ended, so that no space is put before it. Once
        there are more than `most` ids, the rest of the text may be left out.
        """
        if isinstance(text, str):
            text = self.split(text) if special else [Segment(text)]
        ids: list[int] = []
        if add_bos:
            if self.bos_id is None:
                raise TokenizerError("the vocabulary has no BOS token to begin with")
            ids.append(self.bos_id)
        for is_special, segments in groupby(text, key=lambda segment: segment.special):
            if most is not None and len(ids) > most:
                break
            if is_special:
                ids.extend(self._special_id(segment.text) for segment in segments)
                continuing = False
            else:
                plain = "".join(segment.text for segment in segments)
                if ids and ids[-1] in self._vocabulary.strip_after:
                    plain = plain.lstrip(SPACES)
                self._encode_plain(plain, ids, continuing, most)
        return ids

    def least_tokens(self, segments: Iterable[Segment]) -> int:
        """So many ids spell these segments at least, whoever has chosen them: a tokenizer or a model. Much faster than
        `encode`.
        """
        special, text = 0, []
        for segment in segments:
            if segment.special:
                special += 1
            else:
                text.append(segment.text)
        return special + int(self._least.of(self._encoder.spelt(without_replaced("".join(text)))))

    def split(self, text: str) -> list[Segment]:
        """`text` cut at its control tokens: what `encode` does first with `special`. No character is lost."""
        segments: list[Segment] = []
        for is_special, pieces in groupby(self._all_specials.partition(text), key=self._is_special):
            texts = [piece if isinstance(piece, str) else self._vocabulary.texts[piece] for piece in pieces]
            if is_special:
                segments.extend(Segment(name, special=True) for name in texts)
            else:
                segments.append(Segment("".join(texts)))
        return segments

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of `ids`; control tokens are left out unless `special`.

        Where text gets a space put before it, the first token loses a leading space, as in llama.cpp.
        """
        pieces = [self.token_bytes(id_, special=special) for id_ in ids]
        if pieces and self.space_prefix:
            pieces[0] = pieces[0].removeprefix(b" ")
        return b"".join(pieces).decode("utf-8", "replace")

    def token_bytes(self, id_: int, *, special: bool = False) -> bytes:
        """The bytes that a token stands for: part of a character, maybe. A control token has some only if `special`."""
        text = self.token_text(id_)
        kind = self._vocabulary.kinds[id_]
        if kind in (Kind.CONTROL, Kind.UNKNOWN) and not special:
            return b""
        piece = self._bytes[id_]
        if piece is None:
            piece = self._bytes[id_] = self._piece_bytes(text, kind)
        return piece

    @property
    def end_texts(self) -> frozenset[str]:
        """The names of the tokens that end an answer."""
        return frozenset(map(self.token_text, self.eog_ids))

    def token_text(self, id_: int) -> str:
        """The token as it stands in the vocabulary, for inspection."""
        if not 0 <= id_ < self.vocab_size:
            raise TokenizerError(f"token {id_}: no id of this vocabulary (0 to {self.vocab_size - 1:,})")
        return self._vocabulary.texts[id_]

    @cached_property
    def _least(self) -> LeastTokens:
        return self._encoder.least_tokens(self._vocabulary)

    @cached_property
    def _all_specials(self) -> SpecialFinder:
        return SpecialFinder(self._vocabulary.of_kind(Kind.CONTROL, Kind.UNKNOWN, Kind.USER_DEFINED))

    def _is_special(self, piece: str | int) -> bool:
        return isinstance(piece, int) and self._vocabulary.kinds[piece] in (Kind.CONTROL, Kind.UNKNOWN)

    def _special_id(self, text: str) -> int:
        try:
            return self.special_tokens[text]
        except KeyError:
            raise TokenizerError(f"{text!r} is no control token of this vocabulary") from None

    def _encode_plain(self, text: str, ids: list[int], continuing: bool, most: int | None) -> None:
        for piece in self._user_defined.partition(_SURROGATE.sub("\ufffd", text)):
            if isinstance(piece, int):
                ids.append(piece)
            else:
                prefix = " " if self.space_prefix and not continuing else ""
                for some in self._encoder.encode(prefix + piece):
                    ids.extend(some)
                    if most is not None and len(ids) > most:
                        return
            continuing = isinstance(piece, str)

    def _piece_bytes(self, text: str, kind: int) -> bytes:
        if kind == Kind.NORMAL:
            return self._encoder.piece_bytes(text)
        if kind == Kind.BYTE:
            return bytes([_byte(text)])
        if kind in (Kind.UNUSED, Kind.UNDEFINED):
            return b""
        return text.encode("utf-8", "surrogateescape")


def _pretokenizer_name(metadata: Metadata) -> str:
    """What the file names. Files older than the key get `default`, as in llama.cpp, and a warning: it may be wrong."""
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        _log.warning("tokenizer.ggml.pre is missing: using 'default', which may not be the model's; convert it again")
        return "default"
    return str(name)


def _byte(text: str) -> int:
    try:
        return int(text.removeprefix("<0x").removesuffix(">"), 16) & 0xFF
    except ValueError:
        raise TokenizerError(
            f"tokenizer.ggml.tokens: {text!r} is marked as a byte, but is not written as <0x..>"
        ) from None

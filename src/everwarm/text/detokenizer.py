"""Token ids to text, as they come.

In: ids, one at a time. Out: the text that is certain so far: whole characters only, never half of one.

The parts add up to `Tokenizer.decode` of all the ids, also where the bytes are no UTF-8. That includes its rule for
vocabularies that put a space before text: the very first token loses a leading space. Text that goes on where other
text has ended (`continuing`) keeps it.
"""

from codecs import getincrementaldecoder

from everwarm.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one growing sequence of tokens."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False, continuing: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._strip = tokenizer.space_prefix and not continuing
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes: empty if it ends inside a character."""
        piece = self._tokenizer.token_bytes(token_id, special=self._special)
        if self._strip:
            piece = piece.removeprefix(b" ")
            self._strip = False
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What is left once no token will follow: U+FFFD for the beginning of a character, else nothing."""
        return self._decoder.decode(b"", final=True)

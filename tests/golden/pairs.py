"""A vocabulary that makes the cuts between words visible.

Every byte is a token and so is every pair of bytes, with ranks in no order that a language would know. Whether two
neighbours become a pair then depends on where the word begins and ends, in any script. A few whole words that merges
can't make show whether a pre-tokenizer prefers them.
"""

from typing import Any

from everwarm.text.bpe import BYTE_ALPHABET

WHOLE_WORDS = ["Hello", "\u0120Hello", "the", "\u0120the", "123", "...", "HTTPServer", "\u0120\u0120\u0120", "WORLD"]


def pairs_vocabulary() -> dict[str, Any]:
    """Its metadata, but for `tokenizer.ggml.pre`."""
    ranked = [place * 40503 % 65536 for place in range(65536)]
    pairs = [(BYTE_ALPHABET[pair >> 8], BYTE_ALPHABET[pair & 255]) for pair in ranked]
    tokens = [*BYTE_ALPHABET, *(left + right for left, right in pairs), *WHOLE_WORDS, "<|endoftext|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in pairs],
        "tokenizer.ggml.bos_token_id": len(tokens) - 1,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }

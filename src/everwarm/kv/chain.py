"""Names of blocks: a digest of everything that decides what is in them.

A root stands for one salt (a tenant's, or that of an import), one layout, one model and one arithmetic. A block is
named by its parent's name and its token ids, so equal prefixes have equal names. The name says what went in, not what
came out: that the bytes are right is the checksum's business, that the tokens are the same is compared.
"""

import hashlib
from collections.abc import Sequence
from typing import NewType

import numpy as np
import numpy.typing as npt

U32 = npt.NDArray[np.uint32]
Key = NewType("Key", bytes)
KEY_BYTES = 16


def root_key(salt: bytes, layout: str, weights_id: str, numerics_id: str) -> Key:
    """Where the chains of one salt begin."""
    said = "\0".join(["everwarm-kv-1", salt.hex(), layout, weights_id, numerics_id])
    return Key(hashlib.blake2b(said.encode(), digest_size=KEY_BYTES).digest())


def child_key(parent: Key, tokens: bytes) -> Key:
    return Key(hashlib.blake2b(tokens, digest_size=KEY_BYTES, key=parent).digest())


def token_bytes(tokens: Sequence[int] | U32) -> bytes:
    """Big-endian, so that the order of bytes is the order of tokens."""
    return np.asarray(tokens, ">u4").tobytes()


def token_list(data: bytes) -> list[int]:
    tokens: list[int] = np.frombuffer(data, ">u4").tolist()
    return tokens
